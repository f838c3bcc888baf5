"""Returns the token ids of a request's prompts within a deadline, from its model's tokenizer.

This folder turns prompts into the engine's token ids: by the model's own files (`tokens`), or by
asking a worker (`remote_tokenizer`). It renders with `extproc.templates` or `extproc.renderers`,
and remembers known beginnings, so that a turn of a conversation costs what is new in it
(`text_encoder`, `plain_turns`). It knows models and their files. It does not know what workers
hold, nor what the ids are for.

The rule: exactly the engine's ids, or an error with a reason. Where releases could load the same
files differently, they are loaded in each way and compared (`added_tokens`), and an encoder that is
faster is taken only where it was proved equal (`encoder_choice`).

Short prompts are tokenized at once, in the event loop. Longer ones get a thread, of which there are
few: what waits is bounded in number, bytes and time, and shared among clients.
"""

import asyncio
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from extproc.base.errors import RequestError
from extproc.base.shares import Shares
from extproc.requests.prompt import Chat, InferenceRequest, Prompt, TokenIds, forms_of
from extproc.tokenizing.media_parts import MediaParts, before_added, parts_of
from extproc.tokenizing.remote_tokenizer import RemoteTokenizer
from extproc.tokenizing.remote_tokenizer_wire import forms_asked
from kvstate.overlap import Tokens

if TYPE_CHECKING:  # whoever has a tokenizer has imported it, and what it needs
    from extproc.tokenizing.plain_turns import PlainTurns
    from extproc.tokenizing.tokens import StartedPrompt, Tokenizer

AnyTokenizer: TypeAlias = "Tokenizer | RemoteTokenizer"

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

# Work of a thread that takes longer counts as stuck: no legitimate prompt takes a minute to
# tokenize, and nothing can end a thread.
HUNG_SECONDS = 60.0

log = logging.getLogger("kvsteer.tokenizing")

Result = TypeVar("Result")

_IDS = frozenset((array, TokenIds))


class KeyedPrompts(NamedTuple):
    """The tokens of each prompt of a request that the engine computes, and its prompts' forms.

    Of a prompt with media, the tokens are those before it. parts: the parts of the only prompt, if
    it has media and they are known. drops_media: the engine leaves media out, so no token is
    missing.
    """

    tokens: list[Tokens]
    forms: int
    parts: MediaParts | None = None
    drops_media: bool = False


class ThreadUse:
    """Which model's template and tokenizer a thread runs; None if it runs none, or none yet.

    The work in a thread may learn its model only when it has read a request:
    `PromptTokens.tokenize_inline` names it.
    """

    __slots__ = ("model",)

    def __init__(self, model: str | None = None) -> None:
        self.model = model


class PromptTokens:
    """Tokenizes the prompts of requests.

    A model whose template or tokenizer does not come back from a thread is not tokenized any more,
    and the thread is replaced: one model cannot take the tokens of the others away.

    tokenizers: by model. deadline_seconds: for one request. hung_seconds: after which a thread is
    given up. inline_seconds: see `INLINE_MESSAGES`.
    """

    def __init__(
        self,
        tokenizers: Mapping[str, AnyTokenizer],
        deadline_seconds: float,
        hung_seconds: float = HUNG_SECONDS,
        inline_seconds: float = INLINE_SECONDS,
    ) -> None:
        self._inline_seconds = inline_seconds
        self._tokenizers = tokenizers
        self.deadline_seconds = deadline_seconds
        self._hung_seconds = hung_seconds
        self._hung: set[str] = set()
        self._threads = _threads()
        self._free = asyncio.Semaphore(TOKENIZER_THREADS)
        self._places, self._room = Shares(MAX_WAITING), Shares(MAX_WAITING_BYTES)

    @property
    def waiting(self) -> int:
        """The pieces of work that wait for a thread or have one."""
        return self._places.used

    def is_hung(self, model: str) -> bool:
        """Returns whether a model is not tokenized any more, since it has held a thread."""
        return model in self._hung

    def text_of(self, model: str) -> Callable[[Tokens], str] | None:
        """Returns what turns a model's ids into text, None if a worker tokenizes, or nobody."""
        found = self._tokenizers.get(model)
        return None if found is None or isinstance(found, RemoteTokenizer) else found.text_of

    def close(self) -> None:
        """Stops the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def tokenize(
        self,
        request: InferenceRequest,
        model: str,
        body_bytes: int,
        whose: bytes | None = None,
    ) -> KeyedPrompts:
        """Returns the tokens of each prompt that the engine computes, and their forms.

        It waits only for work that takes a millisecond or more, like `run_in_thread`.

        model: the configured one. body_bytes: the size of the request's body. whose: as
        `run_in_thread`.

        Raises:
            RequestError: they are not certain. TimeoutError: they are not known by the deadline.
        """
        ids = self._ids_of(request, model)
        if ids is not None:
            return _keyed(request, KeyedPrompts(ids, 0))
        tokenizer = self._tokenizers.get(model)
        if tokenizer is None:
            raise RequestError("no_tokenizer")
        if isinstance(tokenizer, RemoteTokenizer):
            forms = 0
            for prompt in request.prompts:
                forms |= forms_asked(prompt)
            whole = KeyedPrompts(await self._tokenize_remotely(tokenizer, request), forms)
        elif model in self._hung:
            raise RequestError("tokenizer_hung")
        else:
            whole = await self._local(tokenizer, request.prompts, model, body_bytes, whose)
        return _keyed(request, whole)

    def plain_turns(self, model: str) -> "PlainTurns | None":
        """Returns the turns of a model's plain conversations; None if it takes more to know their
        tokens.
        """
        tokenizer = self._tokenizers.get(model)
        return None if tokenizer is None or model in self._hung else tokenizer.plain_turns

    def tokenize_inline(
        self, request: InferenceRequest, model: str, held: ThreadUse
    ) -> KeyedPrompts | None:
        """Returns the same as `tokenize`, without waiting, however long it takes.

        Returns None if workers must be asked.

        held: what was given to `run_in_thread`, in whose thread this runs.

        Raises:
            RequestError: as `tokenize`.
        """
        tokenizer = self._tokenizers.get(model)
        if isinstance(tokenizer, RemoteTokenizer):
            return None
        ids = self._ids_of(request, model)
        if ids is not None:
            return _keyed(request, KeyedPrompts(ids, 0))
        if tokenizer is None:
            raise RequestError("no_tokenizer")
        if model in self._hung:
            raise RequestError("tokenizer_hung")
        held.model = model
        whole = _finished([tokenizer.start(prompt) for prompt in request.prompts])
        return _keyed(request, whole)

    async def run_in_thread(
        self,
        work: Callable[[], Result],
        body_bytes: int,
        held: ThreadUse | None = None,
        whose: bytes | None = None,
    ) -> Result:
        """Runs work that takes a millisecond or more in a thread, and returns its result.

        body_bytes: the memory that it keeps until it is done. held: whose template and tokenizer it
        runs, if any; the work may name the model later. whose: the client whose request it is, None
        where nobody asks; one cannot take all places.

        Raises:
            RequestError: too much work is waiting already (too_many_waiting); or work raises it.
            TimeoutError: it is not done within the deadline.
        """
        if not self._places.take(whose, 1):
            raise RequestError("too_many_waiting")
        if not self._room.take(whose, body_bytes):
            self._places.give_back(whose, 1)
            raise RequestError("too_many_waiting")
        try:
            await _in_a_task()
            async with asyncio.timeout(self.deadline_seconds):
                # waiting work is dropped at its deadline, not only once it has a thread
                await self._free.acquire()
                loop = asyncio.get_running_loop()
                done = loop.run_in_executor(self._threads, work)
                done.add_done_callback(self._release)
                if held is not None:
                    timer = loop.call_later(self._hung_seconds, self._give_up, done, held)
                    done.add_done_callback(lambda _: timer.cancel())
                try:
                    return await asyncio.shield(done)
                finally:
                    # what it raised leads to this frame, and so to a body, in a circle
                    del done
        finally:
            self._places.give_back(whose, 1)
            self._room.give_back(whose, body_bytes)

    def _give_up(self, done: asyncio.Future[Any], held: ThreadUse) -> None:
        """Replaces the threads, one of which does not come back.

        One that runs no model's template or tokenizer does: it only reads a request.
        """
        if held.model is None:
            return
        self._threads.shutdown(wait=False)
        self._threads = _threads()
        self._hung.add(held.model)
        log.error(
            "model %s: its template or tokenizer has held a thread for %g s: the thread is"
            " replaced, and the model's requests are placed by load until the router restarts",
            held.model,
            self._hung_seconds,
        )
        done.cancel()  # gives its place to the new threads

    def _release(self, done: asyncio.Future[Any]) -> None:
        self._free.release()
        if not done.cancelled():
            done.exception()  # after the deadline nobody else retrieves it

    def _ids_of(self, request: InferenceRequest, model: str) -> list[Tokens] | None:
        """Returns the prompts if all of them are token ids already, else None.

        Raises:
            RequestError: it is not known whether the engine takes them.
        """
        if not _IDS.issuperset(map(type, request.prompts)):  # the usual case
            return None
        found = []
        for prompt in request.prompts:
            if isinstance(prompt, TokenIds):
                self._check(prompt, model)
                found.append(prompt.ids)
            elif isinstance(prompt, array):
                found.append(prompt)
        return found

    def _check(self, given: TokenIds, model: str) -> None:
        """Refuses the ids of a response, unless the model is known not to be gpt-oss."""
        tokenizer = self._tokenizers.get(model)
        if not given.is_response:
            return
        if tokenizer is None or isinstance(tokenizer, RemoteTokenizer) or tokenizer.renders_in_code:
            raise RequestError("unsupported_kv_transfer")

    async def _tokenize_remotely(
        self, tokenizer: RemoteTokenizer, request: InferenceRequest
    ) -> list[Tokens]:
        await _in_a_task()
        asked = (tokenizer.encode(prompt, request.model) for prompt in request.prompts)
        async with asyncio.timeout(self.deadline_seconds):
            return await asyncio.gather(*asked)

    async def _local(
        self,
        tokenizer: "Tokenizer",
        prompts: Sequence[Prompt],
        model: str,
        body_bytes: int,
        whose: bytes | None,
    ) -> KeyedPrompts:
        started = None
        if all(map(_is_short, prompts)):
            started = _started(tokenizer, prompts, self._inline_seconds)
        if started is None:
            start = tokenizer.start
            return await self.run_in_thread(
                lambda: _finished([start(prompt) for prompt in prompts]),
                body_bytes,
                ThreadUse(model),
                whose,
            )
        if len(started) == 1 and started[0].is_cheap:
            return KeyedPrompts([started[0].finish()], started[0].forms)
        return await self.run_in_thread(
            lambda: _finished(started), body_bytes, ThreadUse(model), whose
        )


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokens")


async def _in_a_task() -> None:
    """Yields None once, so that a caller that drives the request by hand makes a task of the rest.

    Only a task can have a timeout or await a future.
    """
    await asyncio.sleep(0)


def _finished(started: "Sequence[StartedPrompt]") -> KeyedPrompts:
    """Returns the tokens of rendered prompts, and the forms that their dialects decided."""
    forms = 0
    for one in started:
        forms |= one.forms
    if len(started) == 1 and started[0].added:
        return _with_media(started[0])
    drops_media = any(one.drops_media for one in started)
    return KeyedPrompts([one.finish() for one in started], forms, drops_media=drops_media)


def _with_media(started: "StartedPrompt") -> KeyedPrompts:
    """Returns the tokens before the first media item of a prompt, and its parts."""
    ids = started.finish()
    parts = parts_of(ids, started.added)
    if parts is not None:
        return KeyedPrompts([parts.texts[0]], started.forms, parts)
    before = before_added(ids, started.added)
    if not before:
        raise RequestError("unsupported_media")
    return KeyedPrompts([before], started.forms)


def _keyed(request: InferenceRequest, whole: KeyedPrompts) -> KeyedPrompts:
    """Returns what the engine computes of whole prompts."""
    tokens, forms = whole.tokens, whole.forms
    for prompt in request.prompts:
        forms |= forms_of(prompt)
    if request.keep_last_tokens is not None:
        tokens = list(map(request.truncate, tokens))
    return KeyedPrompts(tokens, forms, whole.parts, whole.drops_media)


def _is_short(prompt: Prompt) -> bool:
    """Returns whether a prompt may be rendered at once, without a thread.

    With media it may not: every text before them is searched for every added token.
    """
    if not isinstance(prompt, Chat):
        return True
    return len(prompt.messages) <= INLINE_MESSAGES and not prompt.has_media


def _started(
    tokenizer: "Tokenizer", prompts: Sequence[Prompt], seconds: float
) -> "list[StartedPrompt] | None":
    """Renders the prompts and looks them up; returns None if that takes too long here."""
    try:
        return [tokenizer.start(prompt, seconds) for prompt in prompts]
    except RequestError as error:
        if error.reason != "template_too_slow":
            raise
        return None
