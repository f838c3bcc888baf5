"""The token ids of a request's prompts, from whichever tokenizer its model has, in time."""

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from extproc.errors import RequestError
from extproc.requests.prompt import InferenceRequest, Prompt
from extproc.tokenizing.remote_tokenizer import RemoteTokenizer
from extproc.tokenizing.tokens import Tokenizer
from kvstate.events import Tokens

AnyTokenizer = Tokenizer | RemoteTokenizer

# Prompts in longer bodies are rendered beside the event loop. This much takes 0.2 ms, or 2 ms where
# it is thousands of messages.
# The whole body counts: tools and tool calls become prompt text as well.
INLINE_BYTES = 65_536

# Threads for long prompts; tokenizers releases the interpreter lock.
TOKENIZER_THREADS = 2


class PromptTokens:
    """Tokenizes the prompts of requests.

    tokenizers: by model. deadline_seconds: of one request.
    """

    def __init__(self, tokenizers: Mapping[str, AnyTokenizer], deadline_seconds: float) -> None:
        self._tokenizers = tokenizers
        self._deadline_seconds = deadline_seconds
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokens")

    def close(self) -> None:
        """Stops the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def of(
        self, request: InferenceRequest, model: str, body_bytes: int
    ) -> list[Tokens] | Awaitable[list[Tokens]]:
        """What the engine computes of each prompt: at once where that is cheap, else to be awaited.

        model: the configured one.

        Raises:
            RequestError: they are not certain. TimeoutError: not within the deadline.
        """
        whole = self._whole(request, model, body_bytes)
        if isinstance(whole, list):
            return [request.kept(tokens) for tokens in whole]
        return _kept(request, whole)

    def _whole(
        self, request: InferenceRequest, model: str, body_bytes: int
    ) -> list[Tokens] | Awaitable[list[Tokens]]:
        prompts = request.prompts
        ids = [prompt for prompt in prompts if isinstance(prompt, array)]
        if len(ids) == len(prompts):
            return ids
        tokenizer = self._tokenizers.get(model)
        if tokenizer is None:
            raise RequestError("no_tokenizer")
        if isinstance(tokenizer, RemoteTokenizer):
            return self._asked(tokenizer, request)
        return self._local(tokenizer, prompts, body_bytes)

    async def _asked(self, tokenizer: RemoteTokenizer, request: InferenceRequest) -> list[Tokens]:
        asked = (tokenizer.encode(prompt, request.model) for prompt in request.prompts)
        async with asyncio.timeout(self._deadline_seconds):
            return await asyncio.gather(*asked)

    def _local(
        self, tokenizer: Tokenizer, prompts: Sequence[Prompt], body_bytes: int
    ) -> list[Tokens] | Awaitable[list[Tokens]]:
        """What takes a millisecond is done in a thread, the rest at once."""
        if body_bytes > INLINE_BYTES:
            return self._apart(lambda: [tokenizer.encode(prompt) for prompt in prompts])
        started = [tokenizer.start(prompt) for prompt in prompts]
        if len(started) == 1 and started[0].is_cheap:
            return [started[0].finish()]
        return self._apart(lambda: [one.finish() for one in started])

    async def _apart(self, encode: Callable[[], list[Tokens]]) -> list[Tokens]:
        async with asyncio.timeout(self._deadline_seconds):
            return await asyncio.get_running_loop().run_in_executor(self._threads, encode)


async def _kept(request: InferenceRequest, whole: Awaitable[list[Tokens]]) -> list[Tokens]:
    return [request.kept(tokens) for tokens in await whole]
