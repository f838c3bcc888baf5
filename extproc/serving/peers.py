"""Who is at the other ends of a server's connections, and what each may take of what all share.

A peer is an address, or a user at a Unix socket: all of its connections together, since opening one
more costs it nothing.
"""

from typing import Generic, TypeVar

from extproc._core import Budget

Connection = TypeVar("Connection")


class Peer(Generic[Connection]):
    """One peer. share: of what all may keep. connections: in the order in which they came."""

    def __init__(self, name: str, share: Budget) -> None:
        self.name = name
        self.share = share
        self.connections: dict[Connection, None] = {}


class Peers(Generic[Connection]):
    """The peers that have connections now. budget: what all may keep together."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._by_name: dict[str, Peer[Connection]] = {}

    def join(self, name: str, connection: Connection) -> Peer[Connection]:
        """Notes a new connection of the peer with this name, and returns the peer."""
        peer = self._by_name.get(name)
        if peer is None:
            peer = self._by_name[name] = Peer(name, self._budget.share())
        peer.connections[connection] = None
        return peer

    def leave(self, peer: Peer[Connection], connection: Connection) -> None:
        """Notes that a connection, which keeps nothing any more, has ended."""
        peer.connections.pop(connection, None)
        if not peer.connections and self._by_name.get(peer.name) is peer:
            del self._by_name[peer.name]

    def crowd(self) -> Peer[Connection] | None:
        """Returns the peer that has more connections than all others together have.

        Returns None if there is none, or if it is the only one.
        """
        if len(self._by_name) <= 1:
            return None
        counts = [len(one.connections) for one in self._by_name.values()]
        most = max(self._by_name.values(), key=lambda one: len(one.connections))
        return most if 2 * len(most.connections) > sum(counts) else None
