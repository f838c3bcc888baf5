import json
from typing import Any

import pytest

from extproc.config.schema import Config, Model, Worker
from extproc.doctor.findings import About, Finding, Verdict
from extproc.doctor.worker_visit import (
    Served,
    judge_block_size,
    judge_clock,
    judge_models,
    judge_prefix_caching,
    model_served,
    models_of,
    told_sources,
)

ABOUT = About("worker")
ONE = Config(models=(Model("a", aliases=("org/a",), lora=("x",)),))
TWO = Config(models=(Model("a"), Model("b")))
NONSENSE = [b"", b"[]", b"1", b'{"data": 1}', b"[" * 5000, b"\xff"]


def of(*models: str, adapters: tuple[str, ...] = ()) -> Served:
    return Served(models, frozenset(adapters))


def judged(config: Config, told: Served, **worker: Any) -> list[Finding]:
    return list(judge_models(ABOUT, config, Worker("h:1", **worker), told))


def size_of(size: int, block_size: int | None = None) -> Finding:
    return judge_block_size(ABOUT, ONE, Worker("h:1", block_size=block_size), size, "its events")


def test_models_and_adapters_are_told_apart() -> None:
    cards = [{"id": "a", "parent": None}, {"id": "x", "parent": "a"}]
    assert models_of(json.dumps({"data": cards}).encode()) == of("a", adapters=("x",))


@pytest.mark.parametrize("answer", NONSENSE)
def test_an_answer_that_makes_no_sense_tells_nothing(answer: bytes) -> None:
    assert models_of(answer) is None
    assert told_sources("/kv_event_sources", answer, "h") is None


def test_the_model_of_a_worker_is_the_configured_the_only_or_the_listed_one() -> None:
    assert model_served(TWO, Worker("h:1", model="b"), of("a")) == TWO.models[1]
    assert model_served(ONE, Worker("h:1"), of("z")) == ONE.models[0]
    assert model_served(TWO, Worker("h:1", learn=True), of("b")) == TWO.models[1]
    assert model_served(TWO, Worker("h:1", learn=True), of("z")) is None


def test_a_model_is_served_under_its_name_or_an_alias() -> None:
    assert {one.code for one in judged(ONE, of("org/a", adapters=("x",)))} == {""}
    assert [one.code for one in judged(ONE, of("z"))] == ["model-not-served"]
    (one,) = judged(TWO, of(*"cdefghijkl"))
    assert one.says.startswith("it serves c, d, e, f, g, h, i, j and 2 more; requests")
    assert judged(TWO, of())[0].says.startswith("it serves nothing")


def test_adapters_that_are_not_listed_are_missing_where_any_are() -> None:
    assert judged(ONE, of("a"))[-1].verdict is Verdict.NOTE
    assert judged(ONE, of("a", adapters=("y",)))[-1].code == "adapter-not-served"
    assert judged(ONE, of("a"), lora=("y",))[-1].code == "adapter-not-served"
    found = judged(ONE, of("a", "org/a", adapters=("y",)), learn=True)
    assert [one.code for one in found] == ["", "adapter-not-configured"]


def test_a_worker_without_adapters_misses_none() -> None:
    assert [one.verdict for one in judged(ONE, of("a", "org/a"), lora=())] == [Verdict.RIGHT]


@pytest.mark.parametrize(("listed", "missing"), [("a", "org/a"), ("org/a", "a")])
def test_a_name_of_a_model_that_its_worker_does_not_list_is_noted(
    listed: str, missing: str
) -> None:
    right, note = judged(ONE, of(listed), lora=())
    assert (right.verdict, note.verdict) == (Verdict.RIGHT, Verdict.NOTE)
    assert note.says.startswith(f"it does not list {missing}: ")


def test_a_clock_may_differ_by_some_seconds() -> None:
    assert judge_clock(ABOUT, -4.0, "the Date").code == ""
    assert "60 s ahead of the local clock" in judge_clock(ABOUT, 60.0, "the Date").says
    assert "60 s behind the local clock" in judge_clock(ABOUT, -60.0, "the Date").says


def test_a_block_size_is_wrong_only_against_the_workers_own() -> None:
    assert size_of(16).verdict is Verdict.RIGHT
    assert size_of(32, block_size=16).code == "block-size"
    assert size_of(32).verdict is Verdict.NOTE
    assert size_of(1).verdict is Verdict.NOTE


def test_a_feed_is_told_off_or_not_spoken_of() -> None:
    listed = {"0": {"endpoint": "tcp://*:5557", "replay_endpoint": None}}
    told = told_sources("/kv_event_sources", json.dumps(listed).encode(), "10.0.0.1")
    assert told is not None
    assert told.sources[0].events == "tcp://10.0.0.1:5557"
    off = told_sources("/server_info", b'{"kv_events": null}', "h")
    assert off is not None
    assert off.sources == ()
    assert told_sources("/server_info", b'{"page_size": 1}', "h") is None


@pytest.mark.parametrize(
    ("metrics", "info", "codes"),
    [
        (b"", b"", []),
        (b'vllm:cache_config_info{a="b",enable_prefix_caching="True"} 1.0', b"", []),
        (
            b'# x\nvllm:cache_config_info{a="b",enable_prefix_caching="False",c="d"} 1.0',
            b"",
            ["prefix-caching-off"],
        ),
        (b'other{enable_prefix_caching="False"} 1.0', b'{"disable_radix_cache": false}', []),
        (b"\xff", b'{"disable_radix_cache": true}', ["prefix-caching-off"]),
        (b"", b"[" * 100_000, []),
        (b"", b'{"disable_radix_cache": 7}', []),
    ],
)
def test_an_engine_that_keeps_no_prefixes_says_so(
    metrics: bytes, info: bytes, codes: list[str]
) -> None:
    found = judge_prefix_caching(About("worker"), metrics, info)
    assert [one.code for one in found] == codes
