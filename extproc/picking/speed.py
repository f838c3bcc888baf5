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

from math import exp
from typing import Generic, TypeVar

# The bounds of slowness.
MIN_SLOWNESS, MAX_SLOWNESS = 1 / 16, 16.0

# The weight of the mean of all workers against the measurements of one, in seconds of work; and the
# weight of the configured speed against the measurements of all.
PRIOR_SECONDS = 0.5
START_SECONDS = 0.02

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

# The share of the mean of all workers that is kept at each new measurement.
MEAN_KEPT = 0.995

# Events arrive later than they happened: the assumed delay at first, and at most. The weight of the
# first one, in measurements, and the share of all earlier ones that is kept at each new one.
START_DELAY_SECONDS = 0.03
MAX_DELAY_SECONDS = 3.0
_START_WEIGHT = 20.0
_KEPT = 0.995

# Nothing can be learned from an engine that stores a prompt only when its answer is complete. It is
# recognized if this share of its requests end this soon after they were seen to be computed.
AT_END_SECONDS = 0.1
AT_END_SHARE = 0.5
_AT_END_STEP = 0.1

Key = TypeVar("Key")


class Common:
    """What the measurements of a whole fleet have in common.

    delay_seconds: how late its events are, from a line fitted to the times of prompts that came to
    idle workers. slowness: the mean, with which a worker begins.
    """

    __slots__ = (
        *("_measured", "_seconds", "_taken", "_weight", "_work", "_work_seconds", "_work_work"),
        *("delay_seconds", "slowness"),
    )

    def __init__(self) -> None:
        self.delay_seconds = START_DELAY_SECONDS
        self.slowness = 1.0
        self._measured = self._taken = START_SECONDS
        self._weight = _START_WEIGHT
        self._seconds = _START_WEIGHT * START_DELAY_SECONDS
        self._work = self._work_work = self._work_seconds = 0.0

    def measured(self, work: float, taken: float) -> None:
        """Adds a measurement of any worker: the expected and the measured seconds."""
        self._measured = MEAN_KEPT * self._measured + work
        self._taken = MEAN_KEPT * self._taken + taken
        self.slowness = min(max(MIN_SLOWNESS, self._taken / self._measured), MAX_SLOWNESS)

    def took(self, work: float, seconds: float) -> None:
        """Adds the seconds of a prompt that came to an idle worker; work: at its learned speed."""
        weight = 1.0 / (work + SHORT_SECONDS)
        self._weight = _KEPT * self._weight + weight
        self._work = _KEPT * self._work + weight * work
        self._seconds = _KEPT * self._seconds + weight * seconds
        self._work_work = _KEPT * self._work_work + weight * work * work
        self._work_seconds = _KEPT * self._work_seconds + weight * work * seconds
        # never 0, since the initial weight has no work
        spread = self._weight * self._work_work - self._work * self._work
        line = self._work_work * self._seconds - self._work * self._work_seconds
        self.delay_seconds = min(max(0.0, line / spread), MAX_DELAY_SECONDS)


class Speed(Generic[Key]):
    """The speed of one worker, and its requests that are not known to be computed.

    slowness: how many times as long as configured a prompt takes. confidence: 0 to 1, how much of
    that is measured. is_even: whether it counts as average. waiting: the requests, oldest first:
    the work of each, and whether that is certain. pace: how many times as fast as configured its
    queue shrinks. A worker about which nothing is learned has a slowness of 1 until the first
    `look`, and then the mean; it is even.
    """

    __slots__ = (
        *("_at", "_at_end", "_fitted", "_is_spoiled", "_since", "_taken", "_unseen_until"),
        *("_was_idle", "_work", "confidence", "is_even", "pace", "slowness", "waiting"),
    )

    def __init__(self) -> None:
        self.slowness = self.pace = 1.0
        self.confidence = 0.0
        self.is_even = True
        self.waiting: dict[Key, tuple[float, bool]] = {}
        self._since = 0.0
        self._was_idle = True
        self._is_spoiled = False  # whether the work done since is unknown
        self._unseen_until = 0.0
        self._at = 0.0
        self._work = self._taken = 0.0
        self._fitted = 1.0
        self._at_end = 0.0

    def begin(self, key: Key, work: float, now: float, *, is_sure: bool) -> None:
        """Notes a request on its way to the worker, whose feed will announce when it is computed.

        is_sure: whether its work is known; if not, it depends on what earlier requests leave to do.
        """
        if work <= LEAST_SECONDS:
            return
        if not self.waiting:
            self._since, self._was_idle = now, True
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

    def computed(self, key: Key, now: float, common: Common) -> None:
        """Notes that a prompt was seen to be computed, and with it all before it."""
        if key not in self.waiting:
            return
        waiting = list(self.waiting)
        computed = map(self.waiting.pop, waiting[: waiting.index(key) + 1])
        work = sum([own for own, is_sure in computed if is_sure])
        seconds = now - self._since
        if not self._is_spoiled and 0.0 <= seconds <= MAX_MEASURED_SECONDS:
            self._measure(work, seconds, now, common)
        self._since, self._was_idle = now, False
        self._is_spoiled = now < self._unseen_until

    def drop(self, key: Key) -> None:
        """Removes a request that ended or moved before it was seen to be computed."""
        if self.waiting.pop(key, None) is not None:
            self._is_spoiled = True

    def ended(self, seconds_after: float) -> None:
        """Notes that a request ended this long after it was seen to be computed."""
        self._at_end += _AT_END_STEP * ((seconds_after < AT_END_SECONDS) - self._at_end)

    def look(self, now: float, common: Common) -> None:
        """Updates the speed: measurements fade with time, and the oldest prompt may be late."""
        faded = exp(-max(0.0, now - self._at) / IDLE_SECONDS)
        self._fit(faded, common)
        if not self.waiting or self._is_spoiled or not self.confidence:
            return
        work = next(iter(self.waiting.values()))[0]
        taken = min(now - self._since - self._delay(common), MAX_MEASURED_SECONDS)
        if taken <= LATE * self._fitted * work + 2 * common.delay_seconds:
            return
        weight = work / (work + SHORT_SECONDS)
        late = self._taken * faded + PRIOR_SECONDS * common.slowness + weight * taken
        late /= self._work * faded + PRIOR_SECONDS + weight * work
        self._set(max(self.slowness, late), self.confidence, common)

    def _delay(self, common: Common) -> float:
        """Returns by how much the measurement under way is too long: 0 between two events."""
        return common.delay_seconds if self._was_idle else 0.0

    def _measure(self, work: float, seconds: float, now: float, common: Common) -> None:
        if self._was_idle and work:
            common.took(work * self._fitted, seconds)
        most = MAX_SURPRISE * self._fitted * (work + SHORT_SECONDS)
        taken = min(max(0.0, seconds - self._delay(common)), most)
        kept = exp(-taken / BUSY_SECONDS - max(0.0, now - self._at) / IDLE_SECONDS)
        weight = work / (work + SHORT_SECONDS)
        self._work = kept * self._work + weight * work
        self._taken = kept * self._taken + weight * taken
        self._at = now
        # if nothing can be learned from the engine, the configured speed is assumed
        common.measured(weight * work, weight * (work if self._at_end > AT_END_SHARE else taken))
        self._fit(1.0, common)

    def _fit(self, faded: float, common: Common) -> None:
        if self._at_end > AT_END_SHARE:
            self._fitted = 1.0
            self._set(1.0, 0.0, common)
            return
        work = self._work * faded
        fitted = self._taken * faded + PRIOR_SECONDS * common.slowness
        self._set(fitted / (work + PRIOR_SECONDS), work / (work + PRIOR_SECONDS), common)
        self._fitted = self.slowness

    def _set(self, slowness: float, confidence: float, common: Common) -> None:
        self.slowness = min(max(MIN_SLOWNESS, slowness), MAX_SLOWNESS)
        in_proportion = self.slowness / common.slowness
        self.is_even = not confidence or 1 / EVEN < in_proportion < EVEN
        self.confidence = confidence
        self.pace = 1.0 / (self.slowness * (1.0 + (CAUTION - 1.0) * confidence))
