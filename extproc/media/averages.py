"""How many tokens a media item has on average, by model and kind, from what engines report."""

from collections.abc import Mapping

from extproc.requests.media import USUAL_TOKENS

# The weight of the latest request beside all before it; the first ones count fully.
LATEST_WEIGHT = 0.05

# What engines report beyond this is no average.
LEAST_TOKENS, MOST_TOKENS = 16.0, 262_144.0


class Averages:
    """The average tokens of media items. Models are the configured ones, so they are few."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, str], tuple[float, int]] = {}

    def tokens_of(self, model: str | None, kind: str) -> float:
        """Returns the average of a kind of items, USUAL_TOKENS while none is known."""
        if model is None:
            return USUAL_TOKENS
        return self._sums.get((model, kind), (USUAL_TOKENS, 0))[0]

    def note(self, model: str, counts: Mapping[str, int], tokens: float) -> None:
        """Notes how many tokens the media of a request had, if all of it was of one kind.

        counts: its items by kind.
        """
        if len(counts) != 1:
            return
        ((kind, items),) = counts.items()
        each = min(MOST_TOKENS, max(LEAST_TOKENS, tokens / items))
        average, seen = self._sums.get((model, kind), (0.0, 0))
        weight = max(LATEST_WEIGHT, 1 / (seen + 1))
        self._sums[model, kind] = (average + weight * (each - average), seen + 1)
