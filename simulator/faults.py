"""Misbehaviour on request: what to do to a worker so that its readers can be tested."""

from collections.abc import Sequence

from simulator.interference import Corruption, ReplayFault
from simulator.rank import Rank


class Faults:
    """Each method concerns one rank, or all if none is named (IndexError if there is none such).

    What was asked for stays asked for over a restart.
    """

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks = ranks

    def drop(self, batches: int, *, rank: int | None = None) -> None:
        """The next batches are numbered and kept for replay, but not sent."""
        for one in self._of(rank):
            one.interference.drop = batches

    def lose(self, batches: int, *, rank: int | None = None) -> None:
        """The next batches are numbered, neither sent nor kept."""
        for one in self._of(rank):
            one.interference.lose = batches

    def duplicate(self, batches: int, *, rank: int | None = None) -> None:
        """The next batches are sent twice."""
        for one in self._of(rank):
            one.interference.duplicate = batches

    def reorder(self, *, rank: int | None = None) -> None:
        """The next two batches are sent in the opposite order: the first waits for the second."""
        for one in self._of(rank):
            one.interference.reorder = True

    def corrupt(self, what: Corruption, *, rank: int | None = None) -> None:
        """The next batch has one undecodable event in the place of its first, or is no msgpack.

        What it tells of did happen. A replay gives the same bytes, as an engine would.
        """
        for one in self._of(rank):
            one.interference.corrupt = what

    def garbage(self, messages: int, *, rank: int | None = None) -> None:
        """Sends random bytes at once, numbered and kept as batches are."""
        for one in self._of(rank):
            if one.publisher is not None:
                one.publisher.publish_garbage(messages)

    def hide_replay(self, fault: ReplayFault | None, *, rank: int | None = None) -> None:
        """silent: requests are swallowed; absent: the socket is closed; truncated: answers stop
        half-way, without the end marker; None: healthy again."""
        for one in self._of(rank):
            if one.publisher is not None:
                one.publisher.show_replay_fault(fault)

    def hide_events(self, *, hidden: bool, rank: int | None = None) -> None:
        """The socket of events is closed, or opened again; the worker serves on, and what it would
        have published is numbered and kept for replays."""
        for one in self._of(rank):
            if one.publisher is not None:
                one.publisher.show_events(hidden=hidden)

    def restart(self, *, rank: int | None = None) -> None:
        """A new incarnation: an empty cache, numbers from 0, an empty replay buffer, and the
        sockets closed and bound again on the same ports. Nothing is announced, but for the clear
        that SGLang begins with."""
        for one in self._of(rank):
            one.restart()

    def _of(self, rank: int | None) -> Sequence[Rank]:
        return self._ranks if rank is None else [self._ranks[rank]]
