import zmq
from hypothesis import given
from hypothesis import strategies as st

from extproc.doctor.feed_visit import Greeted, mechanism_in, socket_in
from kvstate.wire.zmtp import GREETING

READY = b"\x05READY\x08Identity\x00\x00\x00\x00\x0bSocket-Type\x00\x00\x00\x03PUB"


def test_our_own_greeting_is_one() -> None:
    assert mechanism_in(GREETING) == "NULL"
    assert Greeted(mechanism="NULL").is_zmq


def test_what_is_no_greeting_names_no_mechanism() -> None:
    assert mechanism_in(GREETING[:63]) == ""
    assert mechanism_in(b"HTTP/1.1 400 Bad Request".ljust(64)) == ""
    assert mechanism_in(GREETING[:10] + b"\x01" + GREETING[11:]) == ""
    assert not Greeted().is_zmq


def test_the_kind_of_a_socket_is_read_from_its_properties() -> None:
    assert socket_in(READY) == "PUB"
    assert socket_in(b"\x05READY") == ""
    assert socket_in(b"\x05ERROR\x00") == ""


@given(st.binary(max_size=200))
def test_any_bytes_are_read_to_their_end(noise: bytes) -> None:
    mechanism_in(noise)
    socket_in(b"\x05READY" + noise)


def test_libzmq_names_its_sockets_as_we_read_them() -> None:
    assert {zmq.SocketType.PUB.name, zmq.SocketType.XPUB.name} == {"PUB", "XPUB"}
