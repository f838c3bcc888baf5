"""The features that a configuration alone makes; `extproc.running.app` adds the others."""

from collections.abc import Callable, Sequence

from extproc.config.schema import Config
from extproc.features.classes.classes import classes
from extproc.features.feature import Feature
from extproc.features.fetching.fetching import fetching
from extproc.features.handing.handing import handing
from extproc.features.holding.holding import holding
from extproc.features.legs.legs import legs
from extproc.features.misses.misses import misses
from extproc.features.router_parts import RouterParts

# Each makes its feature, or None if the configuration leaves it off. What writes into a body comes
# before `legs`, which writes the fields of transfers at its end.
FEATURES: Sequence[Callable[[Config, RouterParts], Feature | None]] = (
    classes,
    fetching,
    holding,
    handing,
    legs,
    misses,
)


def enabled(config: Config, parts: RouterParts) -> Sequence[Feature]:
    """Returns the features that a configuration enables, in the order in which they are asked."""
    made = [make(config, parts) for make in FEATURES]
    return [feature for feature in made if feature is not None]
