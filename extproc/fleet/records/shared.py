"""What all parts of the fleet use."""

from collections.abc import Callable
from dataclasses import dataclass

from extproc.config.schema import Config
from extproc.fleet.asking.asking_times import AskingTimes
from extproc.fleet.asking.surroundings import Surroundings
from extproc.fleet.records.table import Table
from kvstate.fleet import FollowedWorkers


@dataclass(frozen=True, slots=True)
class SharedByFleet:
    """What all parts of the fleet use."""

    config: Config
    # What the workers hold, as known from their events, and the feeds of these.
    followed: FollowedWorkers
    # The records of the workers.
    table: Table
    surroundings: Surroundings

    @property
    def monotonic(self) -> Callable[[], float]:
        """Returns seconds; the clock of the loads."""
        return self.surroundings.monotonic

    @property
    def chance(self) -> Callable[[], float]:
        """Returns 0 to 1, for jitter."""
        return self.surroundings.chance

    @property
    def times(self) -> AskingTimes:
        """How often workers are asked."""
        return self.surroundings.times
