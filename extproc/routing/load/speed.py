"""Learns how fast each worker computes prompts, from the times at which its feed announces them.

The measured time is that of computing, without waiting: from the end of one prompt to the end of
the next, if that had already arrived, or from the arrival of a prompt at an idle worker. If several
prompts end together, their time counts for all of them, so batches do no harm; an engine is assumed
to begin with the oldest prompt. If the oldest one is taking long, its time so far counts as well:
so a worker that becomes slow is noticed before its next prompt is done.

Everything is relative to the configured speed: work is the time that a prompt should take, in
seconds; slowness is how many times as long it takes. Times are seconds of one clock; setting it
forward or back spoils only the measurement under way.
"""

from collections.abc import Iterable
from itertools import takewhile
from math import exp, inf
from statistics import median, median_low
from typing import Any, Generic, NamedTuple, TypeVar

from extproc._core import Pace

# The bounds of slowness.
MIN_SLOWNESS, MAX_SLOWNESS = 1 / 16, 16.0

# The weight of the mean of all workers against the measurements of one, in seconds of work; and the
# weight of the configured speed against the measurements of all.
PRIOR_SECONDS = 0.5
START_SECONDS = 0.02

# In the mean, a worker counts as at most this many times faster or slower than the median.
MOST_APART = 2.0

# A worker that is less than this many times faster or slower than the mean counts as average: so
# equal workers tie and share the requests, even if their measurements differ by chance.
EVEN = 1.2

# Measurements fade with the time that the worker has computed since, and with the time passed.
BUSY_SECONDS = 8.0
IDLE_SECONDS = 60.0

# Longer measurements are discarded; others count as at most this many times the expected time.
MAX_MEASURED_SECONDS = 30.0
MAX_SURPRISE = 8.0

# Prompts are weighted by their work, short ones by less; prompts of at most LEAST_SECONDS are not
# measured.
SHORT_SECONDS = 0.05
LEAST_SECONDS = 0.02

# The speed is measured while a worker computes prompts. Its queue is assumed to shrink more slowly,
# by up to this factor, so that a worker that was busy is left alone a little longer.
CAUTION = 2.0

# The oldest prompt is late when it takes this many times as long as expected.
LATE = 1.5

# Events arrive later than they happened: the assumed delay at first, and at most. Each measurement
# of a worker's delay keeps this share of the earlier ones; an assumed delay weighs as much as this
# many seconds to the power of -1, which are one to three prompts of next to no work.
START_DELAY_SECONDS = 0.03
MAX_DELAY_SECONDS = 3.0
_KEPT = 0.995
_ASSUMED_WEIGHT = 20.0

# How often the figures of the whole fleet are computed again.
COMMON_SECONDS = 0.5

# Nothing can be learned from an engine that stores a prompt only when its answer is complete. It is
# recognized if this share of its requests end this soon after they were seen to be computed.
AT_END_SECONDS = 0.1
AT_END_SHARE = 0.5
_AT_END_STEP = 0.1

# No sum of what is measured comes near this.
MOST_SAVED = 1e12

Key = TypeVar("Key")


class Common:
    """What the workers of a fleet have in common; a single one moves it little.

    delay_seconds: how late events are, as a median. slowness: the mean, with which a worker begins:
    the time that all took, by the time that it should have taken.
    """

    __slots__ = ("_has_news", "_updated_at", "delay_seconds", "slowness")

    def __init__(self) -> None:
        self.delay_seconds = START_DELAY_SECONDS
        self.slowness = 1.0
        self._updated_at = -inf
        self._has_news = False

    def note_measurement(self) -> None:
        """Notes that a worker was measured."""
        self._has_news = True

    def is_due(self, now: float) -> bool:
        """Returns whether to compute the figures again: after measurements, twice a second."""
        return self._has_news and not 0.0 <= now - self._updated_at < COMMON_SECONDS

    def update(self, speeds: Iterable["Speed[Any]"], now: float) -> None:
        """Computes the figures from the measurements of all workers."""
        self._updated_at, self._has_news = now, False
        measured = [(each.slowness_alone, each) for each in speeds if each.measured_seconds]
        if not measured:
            return
        self.delay_seconds = median_low([each.delay_alone for _, each in measured])
        middle = median([slowness for slowness, _ in measured])
        taken = work = START_SECONDS
        for slowness, each in measured:
            taken += each.measured_seconds
            bounded = min(max(middle / MOST_APART, slowness), middle * MOST_APART)
            work += each.measured_seconds / bounded
        self.slowness = min(max(MIN_SLOWNESS, taken / work), MAX_SLOWNESS)


class Delay:
    """How late one worker's events are: where a line through the times of its prompts begins.

    The line is fitted to the prompts that came while the worker was idle, each with its work and
    the seconds until it was announced. An assumed delay counts like a few prompts without work,
    which do not fade: so the line is determined even if all prompts are equal.
    """

    __slots__ = ("_seconds", "_weight", "_work", "_work_seconds", "_work_work")

    def __init__(self) -> None:
        self._weight = self._seconds = 0.0
        self._work = self._work_work = self._work_seconds = 0.0

    def add(self, work: float, seconds: float) -> None:
        """Adds the seconds from when a prompt came to the idle worker until it was announced."""
        weight = 1.0 / (work + SHORT_SECONDS)
        self._weight = _KEPT * self._weight + weight
        self._work = _KEPT * self._work + weight * work
        self._seconds = _KEPT * self._seconds + weight * seconds
        self._work_work = _KEPT * self._work_work + weight * work * work
        self._work_seconds = _KEPT * self._work_seconds + weight * work * seconds

    @property
    def sums(self) -> tuple[float, float, float, float, float]:
        """The sums from which the line is fitted."""
        return self._weight, self._seconds, self._work, self._work_work, self._work_seconds

    def restore(self, sums: tuple[float, float, float, float, float]) -> None:
        """Begins with the sums of an earlier process."""
        self._weight, self._seconds, self._work, self._work_work, self._work_seconds = sums

    def estimate(self, assumed_seconds: float) -> float:
        """Returns the delay in seconds, between 0 and the mean of what was measured and assumed."""
        weight = self._weight + _ASSUMED_WEIGHT
        seconds = self._seconds + _ASSUMED_WEIGHT * assumed_seconds
        spread = weight * self._work_work - self._work * self._work
        if spread <= 0.0:  # nothing is measured, or only prompts of next to no work
            return assumed_seconds
        line = self._work_work * seconds - self._work * self._work_seconds
        return min(max(0.0, line / spread), seconds / weight, MAX_DELAY_SECONDS)


class SavedSpeed(NamedTuple):
    """The measurements of one worker, for a later process.

    age_seconds: how long ago the last one was. work, taken: their sums, in seconds. at_end: the
    share of requests that ended when they were seen to be computed. delay: the sums of `Delay`.
    """

    age_seconds: float
    work: float
    taken: float
    at_end: float
    delay: tuple[float, float, float, float, float]

    @property
    def is_sound(self) -> bool:
        """Whether a worker can have been measured so."""
        figures = (self.age_seconds, self.work, self.taken, self.at_end, *self.delay)
        return all(0.0 <= one < MOST_SAVED for one in figures) and self.at_end <= 1.0


class Speed(Pace, Generic[Key]):
    """The speed of one worker, and its requests that are not known to be computed.

    slowness: how many times as long as configured a prompt takes. confidence: 0 to 1, how much of
    that is measured. is_even: whether it counts as average. waiting: the requests, oldest first:
    the work of each, and whether that is certain. pace: how many times as fast as configured its
    queue shrinks. delay_seconds: how late its events are. A worker about which nothing is learned
    has a slowness of 1 until the first `look`, and then the mean; it is even.
    """

    __slots__ = (
        "_at_end",
        "_began_at",
        "_delay",
        "_fitted",
        "_is_spoiled",
        "_unseen_until",
        "_updated_at",
        "_was_idle",
        "_work",
        "_work_taken",
        "confidence",
        "delay_seconds",
        "waiting",
    )

    def __init__(self) -> None:
        super().__init__()
        self.confidence = 0.0
        self.waiting: dict[Key, tuple[float, bool]] = {}
        self._began_at = 0.0
        self._was_idle = True
        self._is_spoiled = False  # whether the work done since is unknown
        self._unseen_until = 0.0
        self._updated_at = 0.0
        self._work = self._work_taken = 0.0
        self._fitted = 1.0
        self._at_end = 0.0
        self._delay = Delay()
        self.delay_seconds = START_DELAY_SECONDS

    @property
    def measured_seconds(self) -> float:
        """How long its measurements took, the older ones counting less; 0 without any."""
        return self._work_taken

    @property
    def slowness_alone(self) -> float:
        """The slowness by its own measurements, however old they are.

        It is 1 if nothing can be learned from the engine.
        """
        if self._at_end > AT_END_SHARE:
            return 1.0
        slowness = (self._work_taken + START_SECONDS) / (self._work + START_SECONDS)
        return min(max(MIN_SLOWNESS, slowness), MAX_SLOWNESS)

    @property
    def delay_alone(self) -> float:
        """The delay of its events by its own measurements and the delay assumed at first.

        The fleet's delay is left out: with it, the median would move itself.
        """
        return self._delay.estimate(START_DELAY_SECONDS)

    def begin(self, key: Key, work: float, now: float, *, is_sure: bool) -> None:
        """Notes a request on its way to the worker, whose feed will announce when it is computed.

        is_sure: whether its work is known; if not, it depends on what earlier requests leave to do.
        """
        if work <= LEAST_SECONDS:
            return
        if not self.waiting:
            self._began_at, self._was_idle = now, True
            self._is_spoiled = now < self._unseen_until
        self.waiting[key] = (work, is_sure)

    def begin_unseen(self, work: float, now: float) -> None:
        """Notes a request on its way that nothing will announce as computed."""
        if work > LEAST_SECONDS:
            self._unseen_until = max(self._unseen_until, now) + work * self._fitted
            self._is_spoiled = True

    def is_first(self, key: Key) -> bool:
        """Returns whether a request is the oldest one."""
        return next(iter(self.waiting), None) == key

    def revise(self, key: Key, work: float) -> None:
        """Sets the work of the oldest request, which is certain now: all before it are computed."""
        if self.is_first(key):
            self.waiting[key] = (work, True)

    def note_computed(self, key: Key, now: float, common: Common) -> None:
        """Notes that a prompt was seen to be computed.

        All before it are skipped: the engine begins with the oldest, so they are not computed any
        more, or nothing announces them.
        """
        if key not in self.waiting:
            return
        for earlier in list(takewhile(lambda one: one != key, self.waiting)):
            self.drop(earlier)  # it was not announced, so how much of it was computed is unknown
        work, is_sure = self.waiting.pop(key)
        seconds = now - self._began_at
        if not self._is_spoiled and 0.0 <= seconds <= MAX_MEASURED_SECONDS:
            self._measure(work if is_sure else 0.0, seconds, now, common)
        self._began_at, self._was_idle = now, False
        self._is_spoiled = now < self._unseen_until

    def drop(self, key: Key) -> None:
        """Removes a request of which nobody can see any more when it is computed."""
        if self.waiting.pop(key, None) is not None:
            self._is_spoiled = True

    def note_end(self, seconds_after: float) -> None:
        """Notes that a request ended this long after it was seen to be computed."""
        self._at_end += _AT_END_STEP * ((seconds_after < AT_END_SECONDS) - self._at_end)

    def look(self, now: float, common: Common) -> None:
        """Updates the speed: measurements fade with time, and the oldest prompt may be late."""
        faded = exp(-max(0.0, now - self._updated_at) / IDLE_SECONDS)
        self.delay_seconds = self._delay.estimate(common.delay_seconds)
        self._fit(faded, common)
        if not self.waiting or self._is_spoiled or not self.confidence:
            return
        work = next(iter(self.waiting.values()))[0]
        taken = min(now - self._began_at - self._late(), MAX_MEASURED_SECONDS)
        if taken <= LATE * self._fitted * work + 2 * self.delay_seconds:
            return
        weight = work / (work + SHORT_SECONDS)
        late = self._work_taken * faded + PRIOR_SECONDS * common.slowness + weight * taken
        late /= self._work * faded + PRIOR_SECONDS + weight * work
        self._set(max(self.slowness, late), self.confidence, common)

    def saved(self, now: float) -> SavedSpeed | None:
        """Returns its measurements, None if there are none."""
        if not self._work_taken:
            return None
        age_seconds = max(0.0, now - self._updated_at)
        return SavedSpeed(age_seconds, self._work, self._work_taken, self._at_end, self._delay.sums)

    def restore(self, saved: SavedSpeed, now: float) -> None:
        """Begins with the measurements of an earlier process, unless it has its own."""
        if self._work_taken:
            return
        self._updated_at = now - saved.age_seconds
        self._work, self._work_taken, self._at_end = saved.work, saved.taken, saved.at_end
        self._delay.restore(saved.delay)

    def _late(self) -> float:
        """Returns by how much the measurement under way is too long: 0 between two events."""
        return self.delay_seconds if self._was_idle else 0.0

    def _measure(self, work: float, seconds: float, now: float, common: Common) -> None:
        if self._was_idle and work:
            self._delay.add(work, seconds)
            self.delay_seconds = self._delay.estimate(common.delay_seconds)
        most = MAX_SURPRISE * self._fitted * (work + SHORT_SECONDS)
        taken = min(max(0.0, seconds - self._late()), most)
        kept = exp(-taken / BUSY_SECONDS - max(0.0, now - self._updated_at) / IDLE_SECONDS)
        weight = work / (work + SHORT_SECONDS)
        self._work = kept * self._work + weight * work
        self._work_taken = kept * self._work_taken + weight * taken
        self._updated_at = now
        common.note_measurement()
        self._fit(1.0, common)

    def _fit(self, faded: float, common: Common) -> None:
        if self._at_end > AT_END_SHARE:
            self._fitted = 1.0
            self._set(1.0, 0.0, common)
            return
        work = self._work * faded
        fitted = self._work_taken * faded + PRIOR_SECONDS * common.slowness
        self._set(fitted / (work + PRIOR_SECONDS), work / (work + PRIOR_SECONDS), common)
        self._fitted = self.slowness

    def _set(self, slowness: float, confidence: float, common: Common) -> None:
        self.slowness = min(max(MIN_SLOWNESS, slowness), MAX_SLOWNESS)
        in_proportion = self.slowness / common.slowness
        self.is_even = not confidence or 1 / EVEN < in_proportion < EVEN
        self.confidence = confidence
        self.pace = 1.0 / (self.slowness * (1.0 + (CAUTION - 1.0) * confidence))
