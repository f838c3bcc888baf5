import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.errors import WireError
from kvstate.events import EngineLoad
from kvstate.wire.zmq_wire import MAX_LOAD_BYTES, load_of

# msgspec's encoding of SGLang's LoadStat(3, 2, 1000, 500000, 1), and of that of later releases,
# which says more: 4096 waiting tokens that no cache will serve, and five fields after them
SHORT = bytes.fromhex("96a84c6f6164537461740302cd03e8ce0007a12001")
LONG = bytes.fromhex("9ba84c6f6164537461740302cd03e8ce0007a12001cd1000cd13e840ce075bcd15ce3ade68b1")


def load(payload: bytes) -> EngineLoad:
    return load_of([b"load", bytes(8), payload])


def test_load_of_sglang_is_read_in_both_lengths() -> None:
    assert load(SHORT) == EngineLoad(3, 2, cache_usage=0.002)
    assert load(LONG) == EngineLoad(3, 2, 4096, cache_usage=0.002)


@pytest.mark.parametrize(("used", "capacity", "share"), [(5, 0, None), (20, 10, 1.0), (5, 10, 0.5)])
def test_cache_usage_is_from_0_to_1_or_none(used: int, capacity: int, share: float | None) -> None:
    stat = ["LoadStat", 1, 0, used, capacity, None]
    assert load(msgspec.msgpack.encode(stat)).cache_usage == share


@pytest.mark.parametrize(
    "stat",
    [
        ["LoadStat", 1, 0, 0],
        ["LoadStat", -1, 0, 0, 0, None],
        ["LoadStat", 1, 10**9, 0, 0, None],
        ["LoadStat", 1, 0, 0, 1 << 60, None],
        ["LoadStat", 1.5, 0, 0, 0, None],
        ["LoadStat", "1", 0, 0, 0, None],
        ["KvEvents", 1, 0, 0, 0, None],
        {"type": "LoadStat"},
        [],
        ["LoadStat", 1, 0, 0, 0, None, None, "x" * MAX_LOAD_BYTES],
    ],
)
def test_other_messages_are_refused_as_loads(stat: object) -> None:
    with pytest.raises(WireError):
        load(msgspec.msgpack.encode(stat))


@given(st.binary(max_size=64))
def test_load_of_reads_or_refuses_any_bytes(payload: bytes) -> None:
    for frames in ([], [payload], [b"load", bytes(8), payload], [b"load", SHORT[:-1] + payload]):
        try:
            found = load_of(frames)
        except WireError:
            continue
        assert found.running >= 0
        assert found.cache_usage is None or 0.0 <= found.cache_usage <= 1.0


def test_load_of_refuses_deeply_nested_bytes() -> None:
    with pytest.raises(WireError):
        load(SHORT[:-1] + b"\x91" * (MAX_LOAD_BYTES - 100))
