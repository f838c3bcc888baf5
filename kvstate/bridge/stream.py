"""One subscriber of the bridge: what it gets next, and why its stream ends.

It knows neither gRPC nor time: it is asked for the next message, and says None where there is none
yet. A stream that began is a contiguous account of every rank, or it ends with a status
(`kvstate.bridge.status`).
"""

from collections.abc import Iterator, Sequence

from kvstate.bridge.history import History
from kvstate.bridge.rank import BridgedRank, StateOfRank
from kvstate.bridge.status import Ended, Status
from kvstate.pb.kvsteer_kv_events_pb2 import KvSnapshotChunk
from kvstate.wire.grpc_encoding import encode_cleared, encode_head


def subscribe(ranks: Sequence[BridgedRank], start: int) -> "Subscription | Ended":
    """Begins a stream.

    start: the first batch wanted, of every rank; 0 for the state of now and what follows it.
    """
    for rank in ranks:
        if rank.standing.fault is not None:
            return rank.standing.fault
    for rank in ranks:
        rank.flush()
        history = rank.history
        if start and not history.resumable <= start <= history.next:
            had = f"{history.resumable} to {history.next} can be"
            reason = f"batch {start} of rank {history.rank} cannot be had, {had}"
            return Ended(Status.OUT_OF_RANGE, reason)
    return Subscription(ranks, start)


class Subscription:
    """The messages of one stream; made by `subscribe`."""

    def __init__(self, ranks: Sequence[BridgedRank], start: int) -> None:
        self._ranks = ranks
        self._snapshots = iter(()) if start else _snapshots([rank.state() for rank in ranks])
        self._cursors = [_Cursor(rank.history, start or rank.history.next) for rank in ranks]

    def take(self) -> bytes | Ended | None:
        """The next message, or the end, or None while there is nothing to tell."""
        fault = self._fault()
        if fault is not None:
            return fault
        piece = next(self._snapshots, None)
        return self._next_batch() if piece is None else piece

    def _fault(self) -> Ended | None:
        faults = [cursor.fault for cursor in self._cursors]
        faults += [rank.standing.fault for rank in self._ranks]
        return next((fault for fault in faults if fault is not None), None)

    def _next_batch(self) -> bytes | None:
        """Of the ranks in turn, so that none of them waits for all of another."""
        for position, cursor in enumerate(self._cursors):
            batch = cursor.take()
            if batch is not None:
                self._cursors.append(self._cursors.pop(position))
                return batch
        return None


class _Cursor:
    """Where a stream is in one rank's history."""

    def __init__(self, history: History, start: int) -> None:
        self._history = history
        self._next = start
        self._holes = history.holes

    @property
    def fault(self) -> Ended | None:
        """Why it cannot go on."""
        rank = self._history.rank
        if self._history.holes != self._holes:
            return Ended(Status.DATA_LOSS, f"batches of the engine's rank {rank} were lost")
        if self._next < self._history.oldest:
            reason = f"this subscriber is too slow: batch {self._next} of rank {rank} is gone"
            return Ended(Status.DATA_LOSS, reason)
        return None

    def take(self) -> bytes | None:
        if self._next == self._history.next:
            return None
        self._next += 1
        return self._history.batch(self._next - 1)


def _snapshots(states: list[StateOfRank]) -> Iterator[bytes]:
    for state in states:
        yield from _pieces(state)


def _pieces(state: StateOfRank) -> Iterator[bytes]:
    """The messages of a snapshot, with consecutive numbers; the last one's is the state's."""
    count = len(state.pieces)
    for index, copies in enumerate(state.pieces):
        chunk = KvSnapshotChunk(
            index=index, count=count, blocks=state.blocks, unknown_before=state.unknown_before
        )
        head = state.head._replace(sequence=state.head.sequence - (count - 1 - index))
        cleared = encode_cleared(0) if index == 0 else b""
        yield b"".join([encode_head(head, chunk), cleared, *(copy.entry for copy in copies)])
