"""Looks when workers have what they pull from others, to learn how fast these send it.

A worker's feed announces the blocks that it pulled before it computes the others. Only pulls of
workers with a live feed and hardly any queue are watched: the others' would also show how long
they waited there.
"""

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from extproc.fleet.asking.polling import PeriodicCheck
from extproc.fleet.load.computed import CHECK_SECONDS
from extproc.routing.load.transfers import MAX_MEASURED_SECONDS
from kvstate.overlap import Overlap, Prompt

# The most pulls that are watched, and the tokens looked up at once: decisions wait meanwhile.
MAX_WATCHED = 16
MAX_TOKENS_A_LOOK = 100_000


class _Watched(NamedTuple):
    """A pull: who pulls, how many first tokens of which prompt it has then, and whom to tell."""

    worker: str
    prompt: Prompt
    tokens: int
    until: float
    note: Callable[[float, float], None]


class PullArrivals:
    """The pulls under way that are measured.

    overlaps: returns what workers hold of a prompt. delay_seconds: returns how late a worker's
    events are. monotonic: the clock of the loads.
    """

    def __init__(
        self,
        overlaps: Callable[[Prompt], Mapping[str, Overlap]],
        delay_seconds: Callable[[str], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._overlaps = overlaps
        self._delay_seconds = delay_seconds
        self._monotonic = monotonic
        self._watched: deque[_Watched] = deque()
        self.check = PeriodicCheck(
            self._check, "pulls under way could not be looked up", CHECK_SECONDS
        )

    def watch(
        self, worker: str, prompt: Prompt, tokens: int, note: Callable[[float, float], None]
    ) -> None:
        """Watches until a worker has so many first tokens of a prompt.

        note: is called then, with how late this was seen and the time, in seconds.
        """
        if len(self._watched) < MAX_WATCHED:
            until = self._monotonic() + MAX_MEASURED_SECONDS
            self._watched.append(_Watched(worker, prompt, tokens, until, note))

    def _check(self) -> None:
        """Looks at the oldest first, up to a limit of tokens."""
        now, left = self._monotonic(), MAX_TOKENS_A_LOOK
        for _ in range(len(self._watched)):
            if left <= 0:
                return
            one = self._watched.popleft()
            if now > one.until:
                continue
            left -= len(one.prompt.tokens)
            held = self._overlaps(one.prompt).get(one.worker)
            if held is None or held.held_tokens < one.tokens:
                self._watched.append(one)
            else:
                one.note(self._delay_seconds(one.worker) + CHECK_SECONDS / 2, now)
