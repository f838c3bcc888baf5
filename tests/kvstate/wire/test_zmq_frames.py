import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.errors import WireError
from kvstate.events import Batch
from kvstate.wire.zmq_wire import END_OF_REPLAY, ends_replay, parse_frames


def test_live_message_has_topic_number_and_payload() -> None:
    assert parse_frames([b"kv", b"\0" * 7 + b"\7", b"x"]) == Batch(7, b"x")


def test_replayed_message_is_read_from_its_end() -> None:
    number = (7).to_bytes(8, "big")
    assert parse_frames([b"", number, b"x"]) == parse_frames([b"", b"kv", number, b"x"])


def test_end_of_a_replay_has_no_payload() -> None:
    assert ends_replay(parse_frames([b"", b"", b"\xff" * 8, b""]))
    assert not ends_replay(parse_frames([b"", b"\xff" * 8, b"x"]))
    assert not ends_replay(Batch(0, b""))
    assert END_OF_REPLAY == 2**64 - 1


@pytest.mark.parametrize("frames", [[], [b"x"], [b"kv", b"\0" * 7, b"x"], [b"\0" * 8, b"", b"x"]])
def test_message_without_a_number_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError, match=f"message of {len(frames)} frames has no sequence number"):
        parse_frames(frames)


@given(st.lists(st.binary(max_size=12), max_size=5))
def test_parse_frames_reads_or_refuses_any_frames(frames: list[bytes]) -> None:
    with contextlib.suppress(WireError):
        assert isinstance(parse_frames(frames), Batch)
