"""What workers could load of a prompt from the stores that they mount."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from extproc.config.sections import StoreSettings
from extproc.features.fetching.offers import StoredPrefix
from extproc.routing.inputs.query import Query
from kvstate.overlap import Prompt
from kvstate.stores.stores import StoredTokens, StoreRules


def store_rules(stores: Sequence[StoreSettings]) -> list[StoreRules]:
    """Returns the rules of the configured stores."""
    return [
        StoreRules(
            one.name,
            None if one.workers is None else frozenset(one.workers),
            one.max_age_ms / 1000,
            frozenset([medium.upper() for medium in one.media]),
        )
        for one in stores
    ]


class StoreOffers:
    """The stores of a router's fleet.

    stored: returns what each has of a prompt, and who mounts it. shares: returns what share of the
    tokens offered to them workers loaded lately, by name; those that are left out loaded all.
    """

    def __init__(
        self,
        stores: Sequence[StoreSettings],
        stored: Callable[[Prompt], Iterable[StoredTokens]],
        shares: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._worth: Mapping[str, float] = {one.name: one.worth_percent / 100 for one in stores}
        self._stored = stored
        self._shares = shares

    def offers(self, query: Query) -> Sequence[StoredPrefix]:
        """Returns what workers could load of a query's only prompt."""
        if len(query.prompts) != 1 or not query.reads_cache:
            return ()
        others = frozenset([name for one in query.variants for name in one.workers])
        stored = list(self._stored(query.prompts[0]))
        if not stored:
            return ()
        shares = self._shares()
        return [
            StoredPrefix(
                one.store,
                one.tokens,
                self._worth[one.store],
                set(one.workers) - others,
                shares,
            )
            for one in stored
        ]
