"""A process that publishes the streams of the benchmark over ZMQ, one socket per worker."""

import multiprocessing
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection

import zmq
from churn import WORKERS, Churn, Sent, marker
from peer_dynamo import Selection
from workload import build, message, messages, stored

# The stream published if no layout of the churn is named: the workload of the lookups.
HELD = "held"


class Publisher:
    """The process, as seen by the subscriber.

    stream: a layout of the churn, or HELD.
    """

    def __init__(self, stream: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, stream), daemon=True)
        self._process.start()
        theirs.close()  # so that a failing process ends the wait
        self._number = 0
        self.endpoints: list[str] = self._pipe.recv()

    def wait_for_subscribers(self) -> None:
        """Waits until every socket has its subscriber."""
        self._pipe.send(("subscribers", 0))
        self._pipe.recv()

    def publish(self, part: str) -> int:
        """Starts to publish "fill" or "period"; returns the number of its marker."""
        self._number += 1
        self._pipe.send((part, self._number))
        return self._number

    def close(self) -> None:
        """Ends the process."""
        self._pipe.send(("end", 0))
        self._process.join()


def filled(publisher: Publisher) -> Selection:
    """Starts a selection service on a publisher, and waits until it shows all of "fill"."""
    selection = Selection(publisher.endpoints)
    publisher.wait_for_subscribers()
    selection.wait_for(marker(publisher.publish("fill")), first=0.0)
    return selection


def _serve(pipe: Connection, stream: str) -> None:
    """The process: executes the commands of the pipe."""
    parts = _parts(stream)
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        sockets = [stack.enter_context(context.socket(zmq.XPUB)) for _ in range(WORKERS)]
        for socket in sockets:
            socket.set_hwm(0)
            socket.linger = 0
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets]
        pipe.send([f"tcp://127.0.0.1:{port}" for port in ports])
        sequences = [0] * WORKERS
        while (request := pipe.recv())[0] != "end":
            part, number = request
            if part == "subscribers":
                pipe.send([socket.recv() for socket in sockets])
            else:
                _publish(sockets, sequences, [*parts[part], *_markers(number)])


def _parts(stream: str) -> dict[str, list[Sent]]:
    if stream == HELD:
        held = enumerate(build(WORKERS).held)
        return {"fill": [Sent(n, payload) for n, pieces in held for payload in messages(pieces)]}
    churn = Churn(stream)
    return {"fill": churn.fill, "period": churn.period}


def _markers(number: int) -> Iterable[Sent]:
    payload = message([stored(marker(number))])
    return (Sent(worker, payload) for worker in range(WORKERS))


def _publish(sockets: Sequence[zmq.Socket[bytes]], sequences: list[int], sent: list[Sent]) -> None:
    for worker, payload in sent:
        frames = [b"", sequences[worker].to_bytes(8, "big"), payload]
        sockets[worker].send_multipart(frames, copy=False)
        sequences[worker] += 1
