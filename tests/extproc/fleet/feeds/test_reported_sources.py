import json
from typing import Any

import pytest

from extproc.config.feed_kinds import configured
from extproc.config.schema import WorkerEvents
from extproc.fleet.feeds.reported_sources import (
    PATHS,
    discovered,
    places,
    strange_host,
)
from kvstate.feeds.feed_sources import ZmqSource

VLLM, SGLANG, _ = PATHS


def vllm(**ranks: dict[str, Any]) -> tuple[ZmqSource, ...]:
    answer = {name.removeprefix("rank"): source for name, source in ranks.items()}
    return discovered(VLLM, json.dumps(answer).encode(), "10.0.0.7")


def sglang(**fields: Any) -> tuple[ZmqSource, ...]:
    events = {"publisher": "zmq", "endpoint_port_base": 5557, **fields}
    return discovered(SGLANG, json.dumps({"kv_events": events}).encode(), "::1")


def test_discovered_reads_the_ports_of_each_vllm_rank() -> None:
    first = {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://0.0.0.0:5558", "topic": "kv"}
    second = {"endpoint": "tcp://10.1.1.1:6000", "replay_endpoint": None}
    assert vllm(rank1=second, rank0=first) == (
        ZmqSource("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558", "kv"),
        ZmqSource("tcp://10.1.1.1:6000", None, ""),
    )


def test_discovered_reads_the_base_ports_of_sglang() -> None:
    assert sglang(endpoint_host="*", dp_size=2, replay_endpoint_port_base=5657, topic="t") == (
        ZmqSource("tcp://[::1]:5557", "tcp://[::1]:5657", "t"),
        ZmqSource("tcp://[::1]:5558", "tcp://[::1]:5658", "t"),
    )
    assert sglang(endpoint_host="w") == (ZmqSource("tcp://w:5557", None, ""),)


@pytest.mark.parametrize("answer", [b"", b"\xff", b"[]", b'{"0": 1}', b'{"x": {}}', b"[" * 5000])
def test_discovered_is_empty_for_an_answer_without_a_source(answer: bytes) -> None:
    assert all(discovered(path, answer, "w") == () for path in PATHS)


def test_discovered_ignores_malformed_sources() -> None:
    assert vllm(rank1={"endpoint": "tcp://*:1"}) == ()
    assert vllm(rank0={"endpoint": "tcp://*:x"}) == ()
    assert sglang(publisher="kafka") == ()
    assert sglang(dp_size=100_000) == ()
    assert sglang(endpoint_port_base=99_999) == ()


def test_strange_host_is_one_outside_the_worker() -> None:
    source = ZmqSource("tcp://w:1", "tcp://localhost:2", "")
    assert strange_host([source], {"w", "127.0.0.1"}) == ""
    assert strange_host([source], {"w"}) == "127.0.0.1"
    assert strange_host([ZmqSource("ipc://x", None, "")], ()) == ""


def test_discovered_reads_the_load_port_of_sglang() -> None:
    first, second = sglang(dp_size=2, endpoint_host="w", load_endpoint_port_base=7000)
    assert (first.load, second.load) == ("tcp://w:7000", "tcp://w:7001")
    assert sglang()[0].load is None
    assert sglang(load_endpoint_port_base=99_999) == ()
    assert sglang(load_endpoint_port_base={}) == ()


def test_configured_load_has_a_port_for_each_rank() -> None:
    source = configured(WorkerEvents(zmq="tcp://w:1", load="tcp://w:7000", ranks=2))
    assert isinstance(source, tuple)
    assert [one.load for one in source] == ["tcp://w:7000", "tcp://w:7001"]
    assert ("load", "w", 7001, "") in places(source)
    assert strange_host(source, ()) == "w"


def test_places_are_equal_in_every_spelling_of_a_host() -> None:
    source = ZmqSource("tcp://W:1", "tcp://other:2", "t")
    assert places([source], {"w", "10.0.0.1"}) == {
        ("zmq", "w", 1, "t"),
        ("zmq", "10.0.0.1", 1, "t"),
        ("replay", "other", 2, ""),
    }
    assert places([source]) == {("zmq", "w", 1, "t"), ("replay", "other", 2, "")}
