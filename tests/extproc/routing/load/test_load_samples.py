import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.fleet.asking.engine_metrics import (
    MAX_METRICS_BYTES,
    CacheConfig,
    Sleep,
    cache_of_metrics,
    report_of_feeds,
    report_of_metrics,
    sleep_of_metrics,
)
from extproc.routing.load.endpoint_load import LoadSample
from kvstate.events import EngineLoad

VLLM = b"""# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 1.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
"""
SGLANG = b"""sglang:num_running_reqs{model_name="a } b"} 8 1700000000000
sglang:num_queue_reqs 4\r
sglang:token_usage{model_name="m"} 0.52
"""


@pytest.mark.parametrize(
    ("text", "running", "waiting", "usage"), [(VLLM, 5, 1, 0.5), (SGLANG, 8, 4, 0.52)]
)
def test_report_of_metrics_reads_an_engines_names_and_adds_up_ranks(
    text: bytes, running: int, waiting: int, usage: float
) -> None:
    expected = LoadSample(running=running, waiting=waiting, asked_at=1.5, cache_usage=usage)
    assert report_of_metrics(text, 1.5) == expected


@pytest.mark.parametrize(
    ("lines", "usage"),
    [
        (b"vllm:gpu_cache_usage_perc 0.25", 0.25),
        (b"vllm:gpu_cache_usage_perc 0.25\nvllm:kv_cache_usage_perc 0.5", 0.5),
        (b'sglang:token_usage{rank="0"} 0.25\nsglang:token_usage{rank="1"} 0.75', 0.75),
        (b"vllm:kv_cache_usage_perc 50", None),
        (b"vllm:kv_cache_usage_perc NaN", None),
        (b"vllm:cpu_cache_usage_perc 0.5", None),
    ],
)
def test_report_of_metrics_takes_the_cache_usage_of_the_fullest_rank(
    lines: bytes, usage: float | None
) -> None:
    load = b"vllm:num_requests_running 1\nvllm:num_requests_waiting 0\n"
    report = report_of_metrics(load + lines, 0.0)
    assert report == LoadSample(1, 0, 0.0, cache_usage=usage)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"vllm:num_requests_running 1",
        b"vllm:num_requests_waiting 1",
        b"other_num_requests_running 1\nother_num_requests_waiting 1",
        VLLM.replace(b" 1.0", b" NaN"),
        VLLM.replace(b" 1.0", b" -1"),
        VLLM.replace(b" 1.0", b" 1e300"),
        VLLM.replace(b" 1.0", b" one"),
        b"#" * MAX_METRICS_BYTES + VLLM,
    ],
)
def test_report_of_metrics_is_none_for_pages_without_load(text: bytes) -> None:
    assert report_of_metrics(text, 0.0) is None


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_report_of_metrics_accepts_any_bytes(before: bytes, after: bytes) -> None:
    report_of_metrics(before + b"\nvllm:num_requests_running " + after, 0.0)


def test_report_of_feeds_adds_up_ranks_and_takes_the_oldest_age() -> None:
    loads = [
        (EngineLoad(3, 1, waiting_uncached_tokens=500, cache_usage=0.9), 0.5),
        (EngineLoad(2, 0, 100, 200, cache_usage=1.0, active_cache_usage=0.5, age_ms=1_000), 0.25),
    ]
    assert report_of_feeds(loads, 10.0) == LoadSample(5, 1, 10.0 - 1.25, 700, 0.9)


def test_report_of_feeds_knows_pending_tokens_only_of_complete_ranks() -> None:
    loads = [(EngineLoad(1, 0, 100), 0.0), (EngineLoad(1, 0), 0.0)]
    assert report_of_feeds(loads, 0.0) == LoadSample(2, 0, 0.0)


def test_report_of_feeds_takes_cache_usage_from_the_ranks_that_publish_it() -> None:
    loads = [(EngineLoad(1, 0, cache_usage=usage), 0.0) for usage in (0.25, None, 0.0)]
    assert report_of_feeds(loads, 0.0) == LoadSample(3, 0, 0.0, cache_usage=0.25)
    assert report_of_feeds(loads[2:], 0.0) == LoadSample(1, 0, 0.0, cache_usage=0.0)


def test_report_of_feeds_is_none_without_loads() -> None:
    assert report_of_feeds([], 0.0) is None


CACHE = b'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="%s"} 1.0\n'


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        (CACHE % b"100", 1600),
        (b"# HELP\n" + CACHE % b"100" + CACHE % b"50", 2400),
        (CACHE % b"None", None),
        (CACHE % b"100" + CACHE % b"None", None),
        (CACHE % b"0", None),
        (CACHE.replace(b"block_size", b"other_block_size") % b"100", None),
        (b"", None),
    ],
)
def test_cache_size_is_read_from_metrics_of_all_engines(text: bytes, tokens: int | None) -> None:
    assert cache_of_metrics(text).tokens == tokens


def cache_info(labels: str) -> bytes:
    return f"# TYPE x gauge\nvllm:cache_config_info{{{labels}}} 1.0\n".encode()


@pytest.mark.parametrize(
    ("labels", "config"),
    [
        (
            'mamba_block_size="8",block_size="640",enable_prefix_caching="False"',
            CacheConfig(False, 640),
        ),
        ('enable_prefix_caching="True",engine="0"', CacheConfig(True)),
        ('mamba_block_size="8"', CacheConfig()),
        ('block_size="0",enable_prefix_caching="x"', CacheConfig()),
    ],
)
def test_metrics_say_whether_prefixes_are_cached_and_in_which_blocks(
    labels: str, config: CacheConfig
) -> None:
    assert cache_of_metrics(cache_info(labels)) == config


@pytest.mark.parametrize("text", [b"", b"\xff"])
def test_metrics_that_say_nothing_of_the_cache_mean_nothing(text: bytes) -> None:
    assert cache_of_metrics(text) == CacheConfig()


def sleep_metrics(*engines: str) -> str:
    """vLLM's gauge for engines in these states, "" for one that is paused or wakes up."""
    states = ("awake", "weights_offloaded", "discard_all")
    lines = [
        f'vllm:engine_sleep_state{{engine="{n}",model_name="m",sleep_state="{one}"}}'
        f" {float(one == state)}"
        for n, state in enumerate(engines)
        for one in states
    ]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("engines", "says", "drops_cache"),
    [
        (("awake",), "", False),
        (("awake", "awake"), "", False),
        (("weights_offloaded",), "its engine sleeps at level 1", True),
        (("discard_all",), "its engine sleeps at level 2", True),
        (("awake", "discard_all"), "its engine sleeps at level 2", True),
        (("",), "its engine is paused, or wakes up", False),
    ],
)
def test_sleep_is_read_from_metrics(engines: tuple[str, ...], says: str, drops_cache: bool) -> None:
    assert sleep_of_metrics(sleep_metrics(*engines).encode()) == Sleep(says, drops_cache)


def test_metrics_without_the_gauge_say_nothing_of_sleep() -> None:
    gauge = b'vllm:engine_sleep_state{engine="0",sleep_state="awake"} none\n'
    for text in (b"", VLLM, gauge):
        assert sleep_of_metrics(text) is None
