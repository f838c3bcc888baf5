"""The features of a router: the one list of them."""

from collections.abc import Callable, Sequence

from extproc.config.schema import Config
from extproc.features.feature import Feature
from extproc.features.fetching.fetching import fetching
from extproc.fleet.workers import Workers
from extproc.routing.load.loads import Loads

# Each makes its feature, or None if the configuration leaves it off.
FEATURES: Sequence[Callable[[Config, Workers, Loads], Feature | None]] = (fetching,)


def enabled(config: Config, workers: Workers, loads: Loads) -> Sequence[Feature]:
    """Returns the features that a configuration enables, in the order in which they are asked."""
    made = [make(config, workers, loads) for make in FEATURES]
    return [feature for feature in made if feature is not None]
