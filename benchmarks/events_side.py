"""Rows of the events benchmark: from message bytes to applied, at steady state."""

from collections.abc import Callable, Mapping, Sequence

import zmq
from churn import LAYOUTS, OPERATIONS, WORKERS, Churn, marker
from indexed_workers import CORE, IndexedWorkers
from measure import Cost, Figure, Goal, Result, Round, Row, Scale, interleave, or_reason, timed
from peer_dynamo import Selection
from publisher import Publisher, filled
from workload import BLOCK_SIZE, SYSTEM_BLOCKS

WANTED = Figure([1.0])
RATE_GOAL = Goal(1, ">= 1 M/s", at_least=True)
RATIO_GOAL = Goal(2, ">= 2x", at_least=True)

# The contestants: from memory, and received over ZMQ.
OURS, OVER_ZMQ = "ours", "ours over ZMQ"

Apply = Callable[[int, bytes], None]


def events(scale: Scale) -> list[Row]:
    """Returns the rows of events, timed from message bytes to applied.

    One operation is a store or a removal of one block.
    """
    return [row for layout in LAYOUTS for row in _events(scale, layout)]


def _events(scale: Scale, layout: str) -> list[Row]:
    churn = Churn(layout)
    ours, wired = IndexedWorkers(WORKERS), IndexedWorkers(WORKERS)
    feed = Feed(layout, wired.apply, churn)
    publisher = Publisher(layout)
    selection = or_reason(lambda: filled(publisher))
    contestants = {OURS: _applied(ours, churn), OVER_ZMQ: feed.round}
    if isinstance(selection, Selection):
        contestants["reference"] = Visible(publisher, selection).round
    costs = interleave(scale.event_rounds, contestants)
    figures = {name: _rate(costs[name]) for name in costs}
    reference = figures["reference"] if isinstance(selection, Selection) else selection
    _compare(churn, [ours, wired], selection)
    feed.close()
    publisher.close()
    if isinstance(selection, Selection):
        selection.close()
    return _rows(layout, figures, reference)


def _rows(layout: str, figures: Mapping[str, Figure], reference: Result) -> list[Row]:
    what = f"events, {layout}, {CORE} (M operations/s)"
    return [
        Row(f"{what}; absolute", figures[OURS], WANTED, RATE_GOAL),
        Row(what, figures[OURS], reference, RATIO_GOAL),
        Row(f"{what}; over ZMQ too", figures[OVER_ZMQ], reference),
    ]


def _rate(costs: Sequence[Cost]) -> Figure:
    """Returns millions of operations a second."""
    return Figure([OPERATIONS / cost.lesser / 1e6 for cost in costs])


def _applied(ours: IndexedWorkers, churn: Churn) -> Round:
    """Returns a round that applies one period from memory."""
    for worker, payload in churn.fill:
        ours.apply(worker, payload)

    def one_round() -> Cost:
        apply = ours.apply
        with timed() as cost:
            for worker, payload in churn.period:
                apply(worker, payload)
        return cost

    return one_round


class Feed:
    """One period per round, received over ZMQ with minimal Python code, and applied."""

    def __init__(self, layout: str, apply: Apply, churn: Churn) -> None:
        self._apply = apply
        self._publisher = Publisher(layout)
        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.SUB) for _ in range(WORKERS)]
        self._poller = zmq.Poller()
        for socket, endpoint in zip(self._sockets, self._publisher.endpoints, strict=True):
            socket.set_hwm(0)
            socket.subscribe(b"")
            socket.connect(endpoint)
            self._poller.register(socket, zmq.POLLIN)
        self._numbers = {socket: number for number, socket in enumerate(self._sockets)}
        self._publisher.wait_for_subscribers()
        self._publisher.publish("fill")
        self._receive(len(churn.fill))
        self._messages = len(churn.period)

    def round(self) -> Cost:
        """Has a period published, and applies all of it."""
        with timed() as cost:
            self._publisher.publish("period")
            self._receive(self._messages)
        return cost

    def _receive(self, messages: int) -> None:
        """Receives this many messages and the markers after them."""
        left = messages + WORKERS
        while left:
            for socket, _ in self._poller.poll():
                left -= self._drain(socket)

    def _drain(self, socket: "zmq.Socket[bytes]") -> int:
        worker, taken = self._numbers[socket], 0
        try:
            while True:
                self._apply(worker, socket.recv_multipart(zmq.NOBLOCK)[-1])
                taken += 1
        except zmq.Again:
            return taken

    def close(self) -> None:
        """Ends the publisher and the subscriptions."""
        self._publisher.close()
        self._context.destroy(linger=0)


class Visible:
    """One period per round, from its publication until the service shows its end."""

    def __init__(self, publisher: Publisher, selection: Selection) -> None:
        self._publisher = publisher
        self._selection = selection
        self._wait = 0.0

    def round(self) -> Cost:
        """Has a period published and waits for it; does not check before it can be there."""
        with timed() as cost:
            number = self._publisher.publish("period")
            self._selection.wait_for(marker(number), first=self._wait)
        self._wait = 0.8 * cost.wall
        return cost


def _compare(churn: Churn, both: Sequence[IndexedWorkers], selection: Selection | str) -> None:
    """Checks that all hold what they held before the first period, without chats that have gone."""
    for worker, (resident, gone) in enumerate(zip(churn.resident, churn.gone, strict=True)):
        for piece, held in [(piece, True) for piece in resident[1::50]] + [(gone, False)]:
            tokens = piece.whole + piece.tokens[:1]
            blocks = len(tokens) // BLOCK_SIZE if held else SYSTEM_BLOCKS
            for ours in both:
                _require(ours.overlaps(tokens)[worker] == blocks)
            if isinstance(selection, Selection):
                _require(selection.overlaps(tokens.tolist())[worker] == blocks)


def _require(equal: bool) -> None:
    if not equal:
        raise SystemExit("events: after whole periods something differs from what was held before")
