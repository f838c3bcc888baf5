"""How fast each worker computes prompts, learned from when its feed tells that it stored them.

Measured is service, not waiting: from the end of one prompt to the end of the next one, where that
had come before, or from the arrival of a prompt at an idle worker. What several prompts took that
ended together counts for all of them, so batches do no harm; an engine is taken to begin with the
oldest prompt. Of the oldest that is not computed yet, the time that it took so far counts as well,
if that is long: so a worker that turns slow is noticed before its next prompt is done.

Everything is in proportion to what was configured: work is what a prompt should take, in seconds;
slowness is how many times as long it takes. Times are seconds of one clock; one that is set forward
or back spoils the measurement under way, and no more.
"""

from math import exp
from typing import Generic, TypeVar

# Slowness is held within these.
MIN_SLOWNESS, MAX_SLOWNESS = 1 / 16, 16.0

# What the mean of all workers counts for, against what was measured of one, in seconds of work;
# and what the configured speed counts for, against what was measured of all.
PRIOR_SECONDS = 0.5
START_SECONDS = 0.02

# A worker that is not so many times faster or slower than the mean counts as one of the mean: so
# equal workers tie, and share the requests, whatever chance made their measurements.
EVEN = 1.2

# What was measured fades with the time that the worker worked since, and with all time.
BUSY_SECONDS = 8.0
IDLE_SECONDS = 60.0

# Longer measurements are none, and of one no more is believed than so many times what is expected.
MAX_MEASURED_SECONDS = 30.0
MAX_SURPRISE = 8.0

# Prompts are weighed by their work, short ones by less; less work than the least is not waited for.
SHORT_SECONDS = 0.05
LEAST_SECONDS = 0.02

# What is measured is how fast a worker is that computes prompts. Its queue is taken to shrink more
# slowly, by up to so much, so that one that was busy is left alone a little longer.
CAUTION = 2.0

# The oldest prompt is late when it takes so many times as long as expected.
LATE = 1.5

# What is kept of the mean of all workers at one more measurement.
MEAN_KEPT = 0.995

# An event reaches us later than it happened: so much to begin with, and at most. The weight of the
# first, in measurements, and what is kept of all before at one more.
START_DELAY_SECONDS = 0.03
MAX_DELAY_SECONDS = 3.0
_START_WEIGHT = 20.0
_KEPT = 0.995

# Of an engine that stores a prompt only when its answer is complete nothing can be learned. It is
# one if this share of requests ended so soon after they were seen to be computed.
AT_END_SECONDS = 0.1
AT_END_SHARE = 0.5
_AT_END_STEP = 0.1

Key = TypeVar("Key")


class Common:
    """What the measurements of a whole fleet have in common.

    delay_seconds: by how much its events are late, by a line through what prompts took that came to
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
        """Takes a measurement of any worker: what it should have taken, and what it took."""
        self._measured = MEAN_KEPT * self._measured + work
        self._taken = MEAN_KEPT * self._taken + taken
        self.slowness = min(max(MIN_SLOWNESS, self._taken / self._measured), MAX_SLOWNESS)

    def took(self, work: float, seconds: float) -> None:
        """Takes what a prompt took that came to an idle worker; work: as that worker has it."""
        weight = 1.0 / (work + SHORT_SECONDS)
        self._weight = _KEPT * self._weight + weight
        self._work = _KEPT * self._work + weight * work
        self._seconds = _KEPT * self._seconds + weight * seconds
        self._work_work = _KEPT * self._work_work + weight * work * work
        self._work_seconds = _KEPT * self._work_seconds + weight * work * seconds
        # never 0, since some of the first weight had no work
        spread = self._weight * self._work_work - self._work * self._work
        line = self._work_work * self._seconds - self._work * self._work_seconds
        self.delay_seconds = min(max(0.0, line / spread), MAX_DELAY_SECONDS)


class Speed(Generic[Key]):
    """The speed of one worker, and its requests that are not known to be computed.

    slowness: how many times as long as configured a prompt takes. confidence: 0 to 1, how much of
    that is measured. is_even: whether it counts as one of the mean. waiting: the requests, oldest
    first: the work of each, and whether that is sure. pace: by how many times as fast as configured
    its queue shrinks. A worker of which nothing is learned has a slowness of 1 until it is first
    looked at, and that of the mean from then on; it is even.
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
        self._is_spoiled = False  # whether it is not known what was done since
        self._unseen_until = 0.0
        self._at = 0.0
        self._work = self._taken = 0.0
        self._fitted = 1.0
        self._at_end = 0.0

    def begin(self, key: Key, work: float, now: float, *, is_sure: bool) -> None:
        """A request is on its way to the worker, whose feed will tell when it is computed.

        is_sure: whether its work is known, or depends on what those before it leave to do.
        """
        if work <= LEAST_SECONDS:
            return
        if not self.waiting:
            self._since, self._was_idle = now, True
            self._is_spoiled = now < self._unseen_until
        self.waiting[key] = (work, is_sure)

    def begin_unseen(self, work: float, now: float) -> None:
        """A request is on its way of which nobody will tell when it is computed."""
        if work > LEAST_SECONDS:
            self._unseen_until = max(self._unseen_until, now) + work * self._fitted
            self._is_spoiled = True

    def is_first(self, key: Key) -> bool:
        """Whether a request is the oldest one."""
        return next(iter(self.waiting), None) == key

    def revise(self, key: Key, work: float) -> None:
        """The work of the oldest request is sure now, since all before it are computed."""
        if self.is_first(key):
            self.waiting[key] = (work, True)

    def computed(self, key: Key, now: float, common: Common) -> None:
        """A prompt was seen to be computed, and with it all that came before it."""
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
        """A request is over, or elsewhere, and was not seen to be computed."""
        if self.waiting.pop(key, None) is not None:
            self._is_spoiled = True

    def ended(self, seconds_after: float) -> None:
        """A request ended so long after it was seen to be computed."""
        self._at_end += _AT_END_STEP * ((seconds_after < AT_END_SECONDS) - self._at_end)

    def look(self, now: float, common: Common) -> None:
        """Notices that the oldest prompt is late, or that what was measured is old."""
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
        """By how much the measurement under way is too long; one between two events is not."""
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
        # of an engine of which nothing can be learned, the configured speed is believed
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
