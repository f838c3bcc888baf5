"""Attaching ZMQ sockets to endpoints, with errors in words."""

import zmq
import zmq.asyncio

Socket = zmq.Socket[bytes] | zmq.asyncio.Socket


def bind(socket: Socket, endpoint: str) -> str:
    """Bind; the endpoint with the port that the system chose. OSError if it is taken."""
    socket.ipv6 = "[" in endpoint
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise _in_words("bind", endpoint, error) from error
    return socket.get_string(zmq.LAST_ENDPOINT).rstrip("\0")


def connect(socket: Socket, endpoint: str) -> str:
    """Connect, now or when somebody listens there; the endpoint itself. OSError if it is none."""
    socket.ipv6 = "[" in endpoint
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise _in_words("connect to", endpoint, error) from error
    return endpoint


def _in_words(verb: str, endpoint: str, error: zmq.ZMQError) -> OSError:
    reason = zmq.strerror(error.errno or 0)
    return OSError(error.errno, f"cannot {verb} {endpoint}: {reason}")
