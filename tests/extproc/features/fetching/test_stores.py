"""What workers could load from stores, as a decision sees it."""

from array import array
from collections.abc import Iterator, Sequence

import pytest
from msgspec.structs import replace

from extproc.config.sections import StoreSettings
from extproc.features.fetching.offers import StoredPrefix
from extproc.features.fetching.stores import StoreOffers, store_rules
from extproc.routing.inputs.query import Query, Variant
from kvstate.overlap import Prompt
from kvstate.stores.stores import StoredTokens, StoreRules

PROMPT = Prompt("m", array("I", range(100)))
QUERY = Query("m", [PROMPT])
SETTINGS = (
    StoreSettings("s", worth_percent=30),
    StoreSettings("t", ("a:1",), max_age_ms=600_000, media=("cpu",)),
)
SHARES = {"a": 0.25}


def offered(query: Query, *stored: StoredTokens) -> Sequence[StoredPrefix]:
    def of(_: Prompt) -> Iterator[StoredTokens]:
        yield from stored

    return StoreOffers(SETTINGS, of, lambda: SHARES).offers(query)


def test_offer_says_what_each_store_has_for_whom_and_its_worth() -> None:
    found = offered(QUERY, StoredTokens("s", 64, {"a", "b"}))
    assert found == [StoredPrefix("s", 64, 0.3, {"a", "b"}, SHARES)]


def test_worker_that_reads_a_request_otherwise_is_offered_nothing() -> None:
    query = replace(QUERY, variants=(Variant(frozenset("a"), QUERY.prompts, 1),))
    found = offered(query, StoredTokens("s", 64, {"a", "b"}))
    assert found[0].workers == {"b"}


@pytest.mark.parametrize(
    "query", [replace(QUERY, prompts=[PROMPT, PROMPT]), replace(QUERY, reads_cache=False)]
)
def test_request_that_reads_no_cache_or_has_several_prompts_is_offered_nothing(
    query: Query,
) -> None:
    assert not offered(query, StoredTokens("s", 64, {"a"}))
    assert not offered(QUERY)


def test_rules_of_stores_are_as_configured() -> None:
    minutes = StoreRules("t", frozenset({"a:1"}), 600.0, frozenset({"CPU"}))
    assert store_rules(SETTINGS) == [StoreRules("s"), minutes]
