"""What peers may take of what all share, and who has more connections than all others together."""

from extproc._core import Budget
from extproc.serving.peers import Peers


def test_connections_of_one_peer_share_what_it_may_take() -> None:
    peers = Peers[int](Budget(400))
    first, second = peers.join("10.0.0.1", 1), peers.join("10.0.0.1", 2)
    assert first is second
    assert first.share.take(300)
    assert not second.share.take(1)
    assert peers.join("10.0.0.2", 3).share.take(75)


def test_peer_without_connections_is_forgotten() -> None:
    peers = Peers[int](Budget(400))
    peer = peers.join("10.0.0.1", 1)
    peers.leave(peer, 1)
    peers.leave(peer, 1)  # it left when it was told to go, and again when it was gone
    again = peers.join("10.0.0.1", 2)
    assert again is not peer
    peers.leave(peer, 1)
    assert peers.join("10.0.0.1", 3) is again
    peers.leave(again, 3)
    assert list(again.connections) == [2]


def test_crowd_has_more_connections_than_all_others_together() -> None:
    peers = Peers[int](Budget(0))
    for number in range(3):
        peers.join("10.0.0.1", number)
        assert peers.crowd() is None, "there is nobody else"
    peers.join("10.0.0.2", 3)
    crowd = peers.crowd()
    assert crowd is not None
    assert (crowd.name, list(crowd.connections)) == ("10.0.0.1", [0, 1, 2])
    peers.join("10.0.0.2", 4)
    peers.join("10.0.0.3", 5)
    assert peers.crowd() is None
