from hyperframe.frame import (
    Frame,
    GoAwayFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from extproc.http2 import frames


def reference(data: bytes) -> Frame:
    """The frame as another implementation reads it."""
    one, length = Frame.parse_frame_header(memoryview(data[:9]))
    one.parse_body(memoryview(data[9 : 9 + length]))
    assert len(data) == 9 + length
    return one


def test_settings_are_readable_by_another_implementation() -> None:
    values: dict[int, int] = {frames.Setting.HEADER_TABLE_SIZE: 0, 4: 2**20}
    one = reference(frames.settings(values))
    assert isinstance(one, SettingsFrame)
    assert one.settings == {1: 0, 4: 2**20}
    assert dict(frames.settings_of(frames.settings(values)[9:])) == values
    assert "ACK" in reference(frames.settings_ack()).flags


def test_pings_are_readable_by_another_implementation() -> None:
    asked, answered = reference(frames.ping(b"12345678")), frames.ping(b"12345678", ack=True)
    assert isinstance(asked, PingFrame)
    assert asked.opaque_data == b"12345678"
    assert "ACK" not in asked.flags
    assert "ACK" in reference(answered).flags


def test_window_updates_are_readable_by_another_implementation() -> None:
    one = reference(frames.window_update(3, 77))
    assert isinstance(one, WindowUpdateFrame)
    assert (one.stream_id, one.window_increment) == (3, 77)


def test_resets_are_readable_by_another_implementation() -> None:
    one = reference(frames.rst_stream(5, frames.ErrorCode.CANCEL))
    assert isinstance(one, RstStreamFrame)
    assert (one.stream_id, one.error_code) == (5, 8)


def test_goaway_is_readable_by_another_implementation() -> None:
    one = reference(frames.goaway(9, frames.ErrorCode.PROTOCOL_ERROR, "why"))
    assert isinstance(one, GoAwayFrame)
    assert (one.last_stream_id, one.error_code, one.additional_data) == (9, 1, b"why")


def test_four_bytes_are_a_number() -> None:
    assert frames.uint32(b"\0\0\0\x01\0\0\x01\0", 4) == 256
