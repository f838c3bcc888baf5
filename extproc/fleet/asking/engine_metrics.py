"""Reads a worker's load and state from its engine's metrics, or its load from its ranks' feeds."""

import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from extproc.routing.load.endpoint_load import LoadSample
from kvstate.events import EngineLoad

# Longer texts are cut; an engine's metrics take about 100 KiB.
MAX_METRICS_BYTES = 2 * 1024 * 1024

# Larger numbers are not accepted as numbers of requests.
_MAX_REQUESTS = 1_000_000

# vLLM 0.6 to 0.32 and SGLang 0.4 to 0.5; one series for each model, rank or engine.
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")

# The share of the cache that running requests use: 0 to 1, despite vLLM's names. The second of its
# two names is the older one.
_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")

# A sample of Prometheus' text format 0.0.4: a name, labels in braces, a number.
_SAMPLE = re.compile(
    rb"^((?:vllm|sglang):(?:num_[a-z_]+|[a-z_]+_usage_perc|token_usage))"
    rb"(?:\{[^\n]*\})?[ \t]+([^ \t\r\n]+)",
    re.MULTILINE,
)


# vLLM's gauge: 1 for the present state of each engine, 0 for the others; 0 for all while it is
# paused, or wakes up (v1/metrics/loggers.py, 0.33).
_SLEEP = re.compile(
    rb'^vllm:engine_sleep_state\{[^\n]*sleep_state="([a-z_]+)"[^\n]*\}'
    rb"[ \t]+([01](?:\.0)?)[ \t\r]*$",
    re.MULTILINE,
)
_LEVELS = {"weights_offloaded": 1, "discard_all": 2}


class Sleep(NamedTuple):
    """Whether an engine sleeps.

    says: in words, "" if it is awake. drops_cache: whether it has dropped its cache for that.
    """

    says: str = ""
    drops_cache: bool = False


def sleep_of_metrics(text: bytes) -> Sleep | None:
    """Returns whether any of a worker's engines sleeps; None if its metrics do not say."""
    states: dict[str, list[bool]] = {}
    for state, value in _SLEEP.findall(text[:MAX_METRICS_BYTES]):
        states.setdefault(state.decode(), []).append(value.startswith(b"1"))
    awake = states.get("awake")
    if awake is None:
        return None
    if all(awake):
        return Sleep()
    levels = [level for state, level in _LEVELS.items() if any(states.get(state, ()))]
    if not levels:
        return Sleep("its engine is paused, or wakes up")
    return Sleep(f"its engine sleeps at level {max(levels)}", drops_cache=True)


# vLLM's gauge of each engine's cache, whose figures are labels: num_gpu_blocks blocks of block_size
# tokens, and whether prefixes are cached (v1/metrics/loggers.py, 0.33).
_CACHE = re.compile(rb"^vllm:cache_config_info\{([^\n]*)\}", re.MULTILINE)
_LABEL = re.compile(rb'(?:^|,)(num_gpu_blocks|block_size|enable_prefix_caching)="(\w{1,12})"')
_IS_ON = {b"True": True, b"False": False}


class CacheConfig(NamedTuple):
    """What vLLM's metrics say of a worker's cache; None for each that they do not say.

    is_on: whether it caches prefixes. block_size: in tokens. tokens: how many its engines can cache
    together.
    """

    is_on: bool | None = None
    block_size: int | None = None
    tokens: int | None = None


def cache_of_metrics(text: bytes) -> CacheConfig:
    """Returns what metrics say of the cache of a worker's engines."""
    engines = [dict(_LABEL.findall(one)) for one in _CACHE.findall(text[:MAX_METRICS_BYTES])]
    if not engines:
        return CacheConfig()
    sizes = [_count(one, b"block_size") for one in engines]
    blocks = [_count(one, b"num_gpu_blocks") for one in engines]
    tokens = sum(map(operator.mul, blocks, sizes)) if all(blocks) and all(sizes) else None
    is_on = _IS_ON.get(engines[0].get(b"enable_prefix_caching", b""))
    return CacheConfig(is_on, sizes[0] or None, tokens)


def _count(labels: Mapping[bytes, bytes], name: bytes) -> int:
    """Returns a label that is a number, 0 if it is none."""
    value = labels.get(name, b"")
    return int(value) if value.isdigit() else 0


def report_of_metrics(text: bytes, asked_at: float) -> LoadSample | None:
    """Returns the load in a worker's metrics, over all its series; None if it is missing."""
    values: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(text[:MAX_METRICS_BYTES]):
        number = _number(value)
        if number is not None:
            values.setdefault(name.decode(), []).append(number)
    running = [_requests(values[name]) for name in _RUNNING if name in values]
    waiting = [_requests(values[name]) for name in _WAITING if name in values]
    if not running or not waiting:
        return None
    usage = [max(values[name]) for name in _USAGE if name in values]
    is_share = bool(usage) and usage[0] <= 1.0
    return LoadSample(running[0], waiting[0], asked_at, cache_usage=usage[0] if is_share else None)


def _requests(series: Sequence[float]) -> int:
    return sum(round(number) for number in series)


def _number(value: bytes) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) and 0 <= number <= _MAX_REQUESTS else None


def report_of_feeds(loads: Sequence[tuple[EngineLoad, float]], now: float) -> LoadSample | None:
    """Returns the load of a worker, from the loads that its ranks' feeds reported.

    loads: each with its age in seconds since it arrived. Returns None if no feed reports any.
    """
    if not loads:
        return None
    age = max(seconds + load.age_ms / 1000 for load, seconds in loads)
    pending = [tokens for load, _ in loads if (tokens := _pending(load)) is not None]
    used = [share for load, _ in loads if (share := _usage(load)) is not None]
    return LoadSample(
        running=sum(load.running for load, _ in loads),
        waiting=sum(load.waiting for load, _ in loads),
        asked_at=now - age,
        pending_tokens=sum(pending) if len(pending) == len(loads) else None,
        cache_usage=max(used) if used else None,
    )


def _usage(load: EngineLoad) -> float | None:
    active = load.active_cache_usage
    return load.cache_usage if active is None else active


def _pending(load: EngineLoad) -> int | None:
    if load.prefill_pending_tokens is not None:
        return load.prefill_pending_tokens
    return load.waiting_uncached_tokens
