"""A ZMQ publisher like an engine's, for tests."""

import zmq
import zmq.asyncio


class Publisher:
    """The engine's side: sockets bound to 127.0.0.1, closed with the test."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self._sockets: list[zmq.asyncio.Socket] = []

    def bind(self, kind: int, address: str = "tcp://127.0.0.1:0") -> tuple[zmq.asyncio.Socket, str]:
        socket = self.context.socket(kind)
        self._sockets.append(socket)
        socket.bind(address)
        return socket, socket.get_string(zmq.LAST_ENDPOINT)

    def connect(self, kind: int, address: str) -> zmq.asyncio.Socket:
        socket = self.context.socket(kind)
        self._sockets.append(socket)
        socket.connect(address)
        return socket

    def close(self) -> None:
        for each in self._sockets:
            each.close(linger=0)
        self.context.destroy(linger=0)  # do not wait for what a failed test left open
