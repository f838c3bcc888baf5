"""Returns the token ids of a request's prompts within a deadline, from its model's tokenizer."""

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from extproc.errors import RequestError
from extproc.requests.prompt import Chat, InferenceRequest, Prompt
from extproc.tokenizing.remote_tokenizer import RemoteTokenizer
from extproc.tokenizing.tokens import Started, Tokenizer
from kvstate.overlap import Tokens

AnyTokenizer = Tokenizer | RemoteTokenizer

# A conversation of up to this many messages is rendered without a thread: most templates take 5 to
# 30 us a message. If it takes longer than INLINE_SECONDS, a thread renders it from the start.
INLINE_MESSAGES = 64
INLINE_SECONDS = 0.002

# Threads for long prompts; tokenizers releases the interpreter lock.
TOKENIZER_THREADS = 2

# Most requests that wait for a thread or have one, and most bytes of their bodies; further requests
# are placed by load at once, since they would miss their deadline.
MAX_WAITING = 256
MAX_WAITING_BYTES = 64 * 1024 * 1024

Result = TypeVar("Result")

_IDS = frozenset((array,))


class PromptTokens:
    """Tokenizes the prompts of requests.

    tokenizers: by model. deadline_seconds: for one request.
    """

    def __init__(self, tokenizers: Mapping[str, AnyTokenizer], deadline_seconds: float) -> None:
        self._tokenizers = tokenizers
        self._deadline_seconds = deadline_seconds
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokens")
        self._free = asyncio.Semaphore(TOKENIZER_THREADS)
        self._waiting = self._waiting_bytes = 0

    def close(self) -> None:
        """Stops the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def of(self, request: InferenceRequest, model: str, body_bytes: int) -> list[Tokens]:
        """Returns the tokens of each prompt that the engine computes.

        It waits only for work that takes a millisecond or more, like `apart`.

        model: the configured one. body_bytes: the size of the request's body.

        Raises:
            RequestError: they are not certain. TimeoutError: they are not known by the deadline.
        """
        whole = _ids_of(request)
        if whole is None:
            tokenizer = self._tokenizers.get(model)
            if tokenizer is None:
                raise RequestError("no_tokenizer")
            if isinstance(tokenizer, RemoteTokenizer):
                whole = await self._asked(tokenizer, request)
            else:
                whole = await self._local(tokenizer, request.prompts, body_bytes)
        return whole if request.keep_last_tokens is None else list(map(request.kept, whole))

    def here(self, request: InferenceRequest, model: str) -> list[Tokens] | None:
        """Returns the same as `of`, without waiting, however long it takes.

        Returns None if workers must be asked.

        Raises:
            RequestError: as `of`.
        """
        tokenizer = self._tokenizers.get(model)
        if isinstance(tokenizer, RemoteTokenizer):
            return None
        whole = _ids_of(request)
        if whole is None:
            if tokenizer is None:
                raise RequestError("no_tokenizer")
            whole = [tokenizer.encode(prompt) for prompt in request.prompts]
        return whole if request.keep_last_tokens is None else list(map(request.kept, whole))

    async def apart(self, work: Callable[[], Result], body_bytes: int) -> Result:
        """Runs work that takes a millisecond or more in a thread, and returns its result.

        body_bytes: the memory that it keeps until it is done.

        Raises:
            RequestError: too much work is waiting already (too_many_waiting); or work raises it.
            TimeoutError: it is not done within the deadline.
        """
        if self._waiting >= MAX_WAITING or self._waiting_bytes + body_bytes > MAX_WAITING_BYTES:
            raise RequestError("too_many_waiting")
        self._waiting += 1
        self._waiting_bytes += body_bytes
        try:
            await _in_a_task()
            async with asyncio.timeout(self._deadline_seconds):
                # waiting work is dropped at its deadline, not only once it has a thread
                await self._free.acquire()
                done = asyncio.get_running_loop().run_in_executor(self._threads, work)
                done.add_done_callback(self._release)
                return await asyncio.shield(done)
        finally:
            self._waiting -= 1
            self._waiting_bytes -= body_bytes

    def _release(self, done: asyncio.Future[Any]) -> None:
        self._free.release()
        if not done.cancelled():
            done.exception()  # after the deadline nobody else retrieves it

    async def _asked(self, tokenizer: RemoteTokenizer, request: InferenceRequest) -> list[Tokens]:
        await _in_a_task()
        asked = (tokenizer.encode(prompt, request.model) for prompt in request.prompts)
        async with asyncio.timeout(self._deadline_seconds):
            return await asyncio.gather(*asked)

    async def _local(
        self, tokenizer: Tokenizer, prompts: Sequence[Prompt], body_bytes: int
    ) -> list[Tokens]:
        started = _started(tokenizer, prompts) if all(map(_is_short, prompts)) else None
        if started is None:
            encode = tokenizer.encode
            return await self.apart(lambda: [encode(prompt) for prompt in prompts], body_bytes)
        if len(started) == 1 and started[0].is_cheap:
            return [started[0].finish()]
        return await self.apart(lambda: [one.finish() for one in started], body_bytes)


async def _in_a_task() -> None:
    """Yields None once, so that a caller that drives the request by hand makes a task of the rest.

    Only a task can have a timeout or await a future.
    """
    await asyncio.sleep(0)


def _ids_of(request: InferenceRequest) -> list[Tokens] | None:
    """Returns the prompts if all of them are token ids already, else None."""
    if not _IDS.issuperset(map(type, request.prompts)):  # nearly always
        return None
    return [prompt for prompt in request.prompts if isinstance(prompt, array)]


def _is_short(prompt: Prompt) -> bool:
    """Returns whether a prompt may be rendered at once, without a thread.

    With media it may not: every text before them is searched for every added token.
    """
    if not isinstance(prompt, Chat):
        return True
    return len(prompt.messages) <= INLINE_MESSAGES and not prompt.has_media


def _started(tokenizer: Tokenizer, prompts: Sequence[Prompt]) -> list[Started] | None:
    """Renders the prompts and looks them up; returns None if that takes too long here."""
    try:
        return [tokenizer.start(prompt, INLINE_SECONDS) for prompt in prompts]
    except RequestError as error:
        if error.reason != "template_too_slow":
            raise
        return None
