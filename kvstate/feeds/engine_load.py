"""What an engine says of its own load, where its feed carries that."""

import msgspec


class EngineLoad(msgspec.Struct, frozen=True):
    """One report (EngineLoad of smg-grpc-proto 0.4.28; None: the engine did not say).

    running, waiting: requests. waiting_uncached_tokens: prompt tokens of waiting requests that no
    cache will serve. prefill_pending_tokens: prompt tokens handed to the engine that gave no output
    yet. cache_usage: share of the cache in use, 0 to 1; active_cache_usage: without what could be
    evicted. max_running: how many requests run at once. age_ms: of the figures when they were sent.
    silence_ms: since the engine last produced anything while it had work.
    """

    running: int
    waiting: int
    waiting_uncached_tokens: int | None = None
    prefill_pending_tokens: int | None = None
    cache_usage: float = 0.0
    active_cache_usage: float | None = None
    tokens_per_second: float = 0.0
    max_running: int | None = None
    age_ms: int = 0
    silence_ms: int | None = None
