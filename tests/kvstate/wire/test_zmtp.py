import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstate.errors import WireError
from kvstate.wire.zmtp import (
    GREETING,
    MAX_COMMAND_BYTES,
    MAX_COMMANDS,
    MAX_FRAMES,
    ZmtpSession,
    message,
)

OLDER = GREETING[:11] + b"\x00" + GREETING[12:]


def command(name: bytes, data: bytes = b"") -> bytes:
    body = bytes([len(name)]) + name + data
    if len(body) < 256:
        return bytes([4, len(body)]) + body
    return b"\x06" + struct.pack(">Q", len(body)) + body


def ready(kind: bytes) -> bytes:
    metadata = b"\x08Identity" + bytes(4) + b"\x0bSOCKET-TYPE" + struct.pack(">I", len(kind)) + kind
    return command(b"READY", metadata)


def shaken(kind: bytes = b"SUB", peer: bytes = b"PUB", greeting: bytes = GREETING) -> ZmtpSession:
    session = ZmtpSession(kind, 1000, b"kv")
    session.receive(greeting + ready(peer))
    assert session.shake()
    return session


def taken(session: ZmtpSession) -> list[list[bytes]]:
    messages = []
    while (frames := session.take()) is not None:
        messages.append(frames)
    return messages


def test_greeting_comes_first_and_ready_follows_that_of_the_peer() -> None:
    session = ZmtpSession(b"SUB", 1000, b"kv")
    assert session.answers() == GREETING
    assert not session.shake()
    session.receive(GREETING)
    assert not session.shake()
    assert session.answers().startswith(b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x03SUB")
    session.receive(ready(b"XPUB"))
    assert session.shake()
    assert session.answers() == command(b"SUBSCRIBE", b"kv")


def test_older_peer_gets_a_subscription_message_and_no_heartbeats() -> None:
    session = shaken(greeting=OLDER)
    assert session.answers().endswith(message([b"\x01kv"]))
    session.ping()
    assert session.answers() == b""


def test_dealer_subscribes_to_nothing() -> None:
    session = shaken(b"DEALER", b"ROUTER")
    assert session.answers().endswith(b"Identity" + bytes(4))


def test_heartbeats_are_sent_and_answered() -> None:
    session = shaken()
    session.answers()
    session.ping()
    assert session.answers() == command(b"PING", b"\0\0")
    session.receive(command(b"PING", b"\0\x05context") + command(b"PONG"))
    assert session.take() is None
    assert session.answers() == command(b"PONG", b"context")


def test_message_behind_many_commands_is_found_by_several_takes() -> None:
    session = shaken()
    session.receive(command(b"PONG") * (2 * MAX_COMMANDS) + message([b"kv", b"1"]))
    goes = [session.take() for _ in range(3)]
    assert goes == [None, None, [b"kv", b"1"]]
    assert session.commands == 2 * MAX_COMMANDS


frames_of = st.lists(st.binary(max_size=300), min_size=1, max_size=3)


@given(st.lists(frames_of, max_size=6), st.integers(1, 200))
def test_messages_are_read_however_they_are_cut(messages: list[list[bytes]], piece: int) -> None:
    session = shaken()
    wire = b"".join(map(message, messages))
    out = []
    for at in range(0, len(wire), piece):
        session.receive(wire[at : at + piece])
        out += taken(session)
    assert (out, session.size_bytes) == (messages, 0)


@given(st.binary(max_size=400))
def test_session_reads_or_refuses_any_bytes(wire: bytes) -> None:
    for session in (ZmtpSession(b"SUB", 1000), shaken()):
        session.receive(wire)
        try:
            if session.shake():
                taken(session)
        except WireError:
            pass
        assert session.size_bytes <= len(wire)


@pytest.mark.parametrize(
    ("wire", "fault"),
    [
        (b"GET / HTTP/1.1\r\n".ljust(64), "it does not speak ZMTP"),
        (GREETING[:10] + b"\x02" + GREETING[11:], "ZMTP 2, which is too old"),
        (GREETING.replace(b"NULL\0", b"CURVE"), "a security mechanism"),
        (GREETING + ready(b"ROUTER"), "its socket is ROUTER, not PUB"),
        (GREETING + command(b"READY"), "its socket is none, not PUB"),
        (GREETING + command(b"READY", b"\x0bSocket-Type\0\0\xff\xffPUB"), "cut off"),
        (GREETING + command(b"READY", b"\x0bSo"), "cut off"),
        (GREETING + command(b"ERROR", b"\x02no"), "it refuses: no"),
        (GREETING + command(b"PING"), "another command than READY"),
        (GREETING + message([b"early"]), "message before the handshake"),
        (GREETING + b"\x04\0", "command without a name"),
        (GREETING + b"\x04\x02\x02x", "command without a name"),
        (GREETING + b"\x06" + struct.pack(">Q", MAX_COMMAND_BYTES + 1), "too many bytes"),
    ],
)
def test_invalid_handshake_fails(wire: bytes, fault: str) -> None:
    session = ZmtpSession(b"SUB", 1000)
    session.receive(wire)
    with pytest.raises(WireError, match=fault):
        session.shake()


@pytest.mark.parametrize(
    ("wire", "mechanism", "kind"),
    [
        (GREETING + ready(b"PUB"), "NULL", "PUB"),
        (GREETING + ready(b"ROUTER"), "NULL", "ROUTER"),
        (GREETING + command(b"READY"), "NULL", ""),
        (GREETING + command(b"ERROR", b"\0"), "NULL", ""),
        (GREETING.replace(b"NULL\0", b"CURVE"), "CURVE", ""),
        (GREETING[:63], "", ""),
        (b"HTTP/1.1 400 Bad Request".ljust(64), "", ""),
        (GREETING[:10] + b"\x01" + GREETING[11:], "", ""),
    ],
)
def test_peer_kind_is_known_though_the_handshake_fails(
    wire: bytes, mechanism: str, kind: str
) -> None:
    session = ZmtpSession(b"SUB", 1000)
    session.receive(wire)
    with contextlib.suppress(WireError):
        session.shake()
    assert (session.peer_mechanism, session.peer_kind) == (mechanism, kind)


@pytest.mark.parametrize(
    ("wire", "fault"),
    [
        (b"\x08\0", "unknown flags"),
        (b"\x05\0", "unknown flags"),
        (b"\x02" + struct.pack(">Q", 1001), "too many bytes"),
        (message([b"x" * 600, b"y" * 600]), "too many bytes"),
        (message([b""] * (MAX_FRAMES + 1)), f"more than {MAX_FRAMES} frames"),
        (command(b"ERROR", b"\x02no"), "it refuses: no"),
    ],
)
def test_invalid_message_fails(wire: bytes, fault: str) -> None:
    session = shaken()
    session.receive(wire)
    with pytest.raises(WireError, match=fault):
        taken(session)


def test_oversized_command_fails() -> None:
    session = ZmtpSession(b"SUB", 10 * MAX_COMMAND_BYTES)
    session.receive(GREETING + ready(b"PUB") + command(b"X", bytes(MAX_COMMAND_BYTES)))
    assert session.shake()
    with pytest.raises(WireError, match="command of too many bytes"):
        session.take()


def test_long_head_may_come_in_pieces() -> None:
    session = shaken()
    session.receive(message([b"x" * 300])[:5])
    assert session.take() is None
    session.receive(message([b"x" * 300])[5:])
    assert session.take() == [b"x" * 300]
