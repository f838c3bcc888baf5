"""What reaches the fleet from outside besides events: time, chance and the network."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from extproc.fleet.asking.asking_times import USUAL, AskingTimes
from extproc.fleet.asking.host_names import LookUp, addresses_of
from extproc.fleet.asking.polling import Client


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Time, chance and the network; tests have others."""

    # Returns 0 to 1, for jitter.
    chance: Callable[[], float] = random.random
    # Returns seconds; the clock of the loads.
    monotonic: Callable[[], float] = time.monotonic
    # Makes the HTTP client that asks the workers, in a running event loop.
    make_client: Callable[[], Client] = Client
    # Looks up the workers' host names.
    look_up: LookUp = addresses_of
    # How often workers are asked.
    times: AskingTimes = USUAL


USUAL_SURROUNDINGS = Surroundings()
