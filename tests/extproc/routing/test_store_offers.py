"""What workers could load from stores, as a decision sees it."""

from array import array
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from extproc.config.sections import StoreSettings
from extproc.routing.eligibility import Candidate
from extproc.routing.fetching import Offers, StoredPrefix
from extproc.routing.load import EndpointLoad, Loads
from extproc.routing.query import Query, Snapshot, Variant
from extproc.routing.store_offers import StoreOffers, store_rules
from kvstate.overlap import Prompt
from kvstate.stores.stores import StoredTokens, StoreRules

PROMPT = Prompt("m", array("I", range(100)))
QUERY = Query("m", [PROMPT])
SNAPSHOT = Snapshot([Candidate("a", "a:1")], [{}], Loads({"a:1": EndpointLoad()}).load, "cost", 0)
SETTINGS = (
    StoreSettings("s", worth_percent=30),
    StoreSettings("t", ("a:1",), max_age_ms=600_000, media=("cpu",)),
)
SHARES = {"a": 0.25}


def offered(query: Query, *stored: StoredTokens) -> Offers | None:
    def of(_: Prompt) -> Iterator[StoredTokens]:
        yield from stored

    return StoreOffers(SETTINGS, 8_000.0, of, lambda: SHARES).offer(query, SNAPSHOT).offers


def test_offer_says_what_each_store_has_for_whom_and_its_worth() -> None:
    found = offered(QUERY, StoredTokens("s", 64, {"a", "b"}))
    assert found == Offers(8_000.0, stores=[StoredPrefix("s", 64, 0.3, {"a", "b"}, SHARES)])


def test_worker_that_reads_a_request_otherwise_is_offered_nothing() -> None:
    query = replace(QUERY, variants=(Variant(frozenset("a"), QUERY.prompts, 1),))
    found = offered(query, StoredTokens("s", 64, {"a", "b"}))
    assert found is not None
    assert found.stores[0].workers == {"b"}


@pytest.mark.parametrize(
    "query", [replace(QUERY, prompts=[PROMPT, PROMPT]), replace(QUERY, reads_cache=False)]
)
def test_request_that_reads_no_cache_or_has_several_prompts_is_offered_nothing(
    query: Query,
) -> None:
    assert offered(query, StoredTokens("s", 64, {"a"})) is None
    assert offered(QUERY) is None


def test_rules_of_stores_are_as_configured() -> None:
    minutes = StoreRules("t", frozenset({"a:1"}), 600.0, frozenset({"CPU"}))
    assert store_rules(SETTINGS) == [StoreRules("s"), minutes]
