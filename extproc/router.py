"""The path of a request: parse, tokens, decide, book. One router serves all streams."""

import asyncio
import functools
import logging
import time
import traceback
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

from extproc.config import Config
from extproc.decision import Decision, Query, Snapshot, decide, explanation
from extproc.errors import RequestError
from extproc.load import Booking, Loads
from extproc.metrics import Metrics
from extproc.models import Models, Served
from extproc.request import InferenceRequest, Prompt, is_inference, model_of, parse
from extproc.stream import Ask, Head
from extproc.tokens import Tokenizer
from extproc.workers import Workers
from kvstate.events import Tokens
from kvstate.overlap import Prompt as Keyed

log = logging.getLogger("kvsteer.decision")

# Prompts in longer bodies are tokenized beside the event loop (this much takes a millisecond). The
# whole body counts: tools and tool calls become prompt text as well.
INLINE_BYTES = 2_048

# Threads for long prompts; tokenizers releases the interpreter lock.
TOKENIZER_THREADS = 2

# What of a body log_prompts shows.
LOGGED_BODY_BYTES = 4_096


class Router:
    """Decides where requests go.

    tokenizers: by model; a model without one is routed by load.
    monotonic: seconds, for deadlines and load.
    """

    def __init__(
        self,
        config: Config,
        workers: Workers,
        tokenizers: Mapping[str, Tokenizer],
        metrics: Metrics,
        rng: Random,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._models = Models(config.models)
        self._workers = workers
        self._tokenizers = tokenizers
        self._metrics = metrics
        self._rng = rng
        self._monotonic = monotonic
        self._loads = Loads()
        self._turns: Counter[str | None] = Counter()
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokens")

    async def route(self, ask: Ask) -> tuple[Decision, Booking | None]:
        """Decides and books; never fails, whatever the request is.

        The booking, if a worker was picked, is to be given to `release` when the request is over.
        """
        started = self._monotonic()
        if self._config.log_prompts and ask.body is not None:
            log.debug("body: %s", ask.body[:LOGGED_BODY_BYTES].decode(errors="replace"))
        decision = await self._decide(ask)
        self._metrics.observe_decision(decision, self._monotonic() - started)
        self._tell(decision)
        # last: what fails before it leaves no load behind that nobody would release
        return decision, self._book(decision)

    async def explain(self, head: Head, body: bytes) -> dict[str, Any]:
        """The answer of POST /explain: the decision for a request, without any effect."""
        ask = Ask(head, body)
        if not is_inference(head.method, head.path):
            ask = Ask(head, None, "not_inference")
        return explanation(await self._decide(ask), self._workers.state)

    def release(self, booking: Booking) -> None:
        """The request is over."""
        self._loads.end(booking)

    def in_flight(self, endpoint: str) -> int:
        """Requests under way on an endpoint."""
        return self._loads.in_flight(endpoint)

    def close(self) -> None:
        """Stops the tokenizer threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _decide(self, ask: Ask) -> Decision:
        try:
            return self._place(await self._query(ask))
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must go on
            _tell_fault(error)
            return self._place(Query(self._models.default, reason="internal_error"))

    async def _query(self, ask: Ask) -> Query:
        if ask.body is None:
            return Query(None, reason=ask.reason)
        try:
            request = parse(ask.head.path, ask.body)
        except RequestError as error:
            served = self._models.find(model_of(ask.body))
            return Query(served.model if served else None, reason=error.reason)
        served = self._models.find(request.model)
        if served is None:
            return Query(None, reason="unknown_model")
        try:
            return Query(served.model, await self._keyed(request, served, len(ask.body)))
        except RequestError as error:
            return Query(served.model, reason=error.reason)
        except TimeoutError:
            return Query(served.model, reason="deadline")

    async def _keyed(
        self, request: InferenceRequest, served: Served, body_bytes: int
    ) -> list[Keyed]:
        encode = functools.partial(self._encode, request.prompts, served.model)
        if body_bytes <= INLINE_BYTES or all(isinstance(one, array) for one in request.prompts):
            tokens = encode()
        else:
            async with asyncio.timeout(self._config.extproc.deadline_ms / 1000):
                tokens = await asyncio.get_running_loop().run_in_executor(self._threads, encode)
        return [Keyed(served.model, one, served.lora, request.cache_salt) for one in tokens]

    def _encode(self, prompts: Sequence[Prompt], model: str) -> list[Tokens]:
        tokenizer = self._tokenizers.get(model)
        if tokenizer is not None:
            return [tokenizer.encode(prompt) for prompt in prompts]
        tokens = [prompt for prompt in prompts if isinstance(prompt, array)]
        if len(tokens) < len(prompts):
            raise RequestError("no_tokenizer")
        return tokens

    def _place(self, query: Query) -> Decision:
        snapshot = Snapshot(
            workers=self._workers.candidates(query.model or self._models.default),
            overlaps=self._workers.overlaps,
            load=self._loads.load,
            policy=self._config.policy.name,
            turn=self._turns[query.model],
        )
        return decide(query, snapshot, self._monotonic(), self._rng)

    def _book(self, decision: Decision) -> Booking | None:
        self._turns[decision.model] += 1
        if not decision.pick:
            return None
        return self._loads.begin(decision.pick[0], decision.uncached_tokens, self._monotonic())

    def _tell(self, decision: Decision) -> None:
        if not log.isEnabledFor(logging.DEBUG):
            return
        log.debug(
            "decision: model %s, worker %s, overlap %d of %d tokens, uncertain %d, reason %s",
            decision.model,
            decision.pick[0] if decision.pick else None,
            decision.certain_tokens,
            decision.prompt_tokens,
            decision.uncertain_tokens,
            decision.reason,
        )


def _tell_fault(error: Exception) -> None:
    """Where it happened, never what the exception says: that may quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error(
        "decision failed with %s; the request is routed by load\n%s", type(error).__name__, frames
    )
