"""Who is connected, told from libzmq's events alone; over sockets: test_zmq_transport."""

import zmq

from kvstate.feeds.transport import Connected, Disconnected, Signal
from kvstate.feeds.zmq_monitor import Peers

OPEN, SHAKEN, CLOSED = zmq.EVENT_ACCEPTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED
FAILED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
LOST = Disconnected()


def told(*events: tuple[int, int]) -> list[Signal]:
    """What a socket's events, each with its value, tell after one another."""
    peers = Peers()
    return [signal for event in events for signal in peers.take(*event)]


def test_handshake_makes_a_peer_until_it_is_disconnected() -> None:
    assert told((OPEN, 5), (SHAKEN, 0), (CLOSED, 5)) == [Connected(), LOST]


def test_connection_without_a_handshake_is_nobody() -> None:
    peer = ((OPEN, 5), (SHAKEN, 0))
    assert told((OPEN, 6), (CLOSED, 6), *peer, (OPEN, 6), (CLOSED, 6)) == [Connected()]


def test_connection_whose_handshake_failed_is_nobody() -> None:
    peer = ((OPEN, 5), (SHAKEN, 0))
    assert told(*peer, (OPEN, 6), (FAILED, 0), (CLOSED, 6), (CLOSED, 5)) == [Connected(), LOST]


def test_second_peer_is_named_and_its_end_is_a_new_connection() -> None:
    two = ((OPEN, 5), (SHAKEN, 0), (OPEN, 6), (SHAKEN, 0))
    signals = told(*two, (CLOSED, 5))
    assert signals[0] == signals[2] == Connected()
    assert "2 publishers" in getattr(signals[1], "reason", "")


def test_failed_handshake_tells_which_of_two_was_the_peer() -> None:
    both = ((OPEN, 5), (OPEN, 6), (SHAKEN, 0), (FAILED, 0), (CLOSED, 6))
    assert told(*both) == [Connected()]
    assert told(*both, (CLOSED, 5)) == [Connected(), LOST]


def test_whoever_is_left_of_two_that_cannot_be_told_apart_has_to_prove_itself() -> None:
    both = ((OPEN, 5), (OPEN, 6), (SHAKEN, 0), (CLOSED, 5))
    assert told(*both) == [Connected(), LOST, Connected()]
    assert told(*both, (CLOSED, 6)) == [Connected(), LOST, Connected(), LOST]


def test_two_peers_whose_handshakes_crossed_are_both_peers() -> None:
    both = ((OPEN, 5), (OPEN, 6), (SHAKEN, 0), (SHAKEN, 0), (CLOSED, 6), (CLOSED, 5))
    signals = told(*both)
    assert [type(signal) for signal in signals] == [
        Connected,
        Disconnected,
        Connected,
        Disconnected,
    ]
