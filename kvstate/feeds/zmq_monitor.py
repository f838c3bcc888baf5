"""Whether a ZMQ socket is connected to the one peer that it should have."""

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from kvstate.feeds.transport import Connected, Disconnected, Signal

_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_BEGUN = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED
_WATCHED = _BEGUN | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _FAILED


class Peers:
    """Counts the peers of a socket, by libzmq's own events.

    A connection is a peer from its handshake on; what is no ZMQ at all (a scanner, a client of TLS)
    is disconnected without one. Connections are told apart by their file descriptors, which the
    events of a handshake do not name: where several are under way, which of them is the peer may
    stay open for a while.
    """

    def __init__(self) -> None:
        self.count = 0
        self._undecided: set[int] = set()  # connections without a handshake that is known of
        self._peers_among_them = 0
        self._handshake_failed = False

    def take(self, event: int, descriptor: int) -> list[Signal]:
        """What an event changed.

        descriptor: the event's value; that of the connection where the event names one.
        """
        if event & _BEGUN:
            self._undecided.add(descriptor)
            return []
        if event & _FAILED:
            self._handshake_failed = True  # its disconnection follows and changes nothing
            return []
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.count += 1
            self._peers_among_them += 1
            self._decide()
            return self._told()
        return self._disconnected(descriptor)

    def _disconnected(self, descriptor: int) -> list[Signal]:
        has_failed, self._handshake_failed = self._handshake_failed, False
        was_undecided = descriptor in self._undecided
        self._undecided.discard(descriptor)
        if was_undecided and (has_failed or not self._peers_among_them):
            self._decide()
            return []
        if not was_undecided or len(self._undecided) < self._peers_among_them:
            self._peers_among_them -= was_undecided
            self.count = max(0, self.count - 1)
            return self._told()
        self._decide()
        # it may have been the peer: whoever is left has to prove that it is the same
        return [Disconnected(), *self._told()]

    def _decide(self) -> None:
        if self._peers_among_them >= len(self._undecided):
            self._undecided.clear()
            self._peers_among_them = 0

    def _told(self) -> list[Signal]:
        if self.count == 1:
            return [Connected()]
        if self.count == 0:
            return [Disconnected()]
        reason = f"{self.count} publishers connect to this endpoint; each rank needs its own"
        return [Disconnected(reason)]


class Monitor:
    """Watches a socket.

    A socket that is bound may get a second peer. Messages do not name their sender, so with two of
    them nothing can be believed; with the second gone the first counts as a new connection.
    """

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self._events = socket.get_monitor_socket(_WATCHED)
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._events, zmq.POLLIN)
        self._poller.register(socket, zmq.POLLIN)
        self._peers = Peers()

    async def wait(self) -> None:
        """Waits until the monitor or its socket has something to read."""
        await self._poller.poll()

    async def changes(self) -> list[Signal]:
        """What happened to the connection since the last look."""
        changes: list[Signal] = []
        while int(self._events.get(zmq.EVENTS)) & zmq.POLLIN:
            message = parse_monitor_message(await self._events.recv_multipart())
            changes += self._peers.take(message["event"], message["value"])
        return changes

    def close(self) -> None:
        """Stops watching."""
        self._socket.disable_monitor()
        self._events.close()
