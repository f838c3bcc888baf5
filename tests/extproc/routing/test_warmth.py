"""What a fleet's decision says of a prompt, in figures alone."""

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.decision import OVER_LIMIT, Decision, Split
from extproc.routing.inputs.query import Query
from extproc.routing.load.loads import Load
from extproc.routing.warmth import warm_share, warmth_as_json, warmth_of
from kvstate.overlap import Overlap, Prompt
from tests.extproc.routing.books import NOTHING, QUERY, WORKERS, decided, ledger

HELD = {"a": Overlap(10, (20, 30, 0, 0), 5), "b": Overlap(10, (10, 0, 0, 0))}


def idle(_: str) -> Load:
    return Load()


def with_claims(excluded: tuple[str, ...] = ("", "", ""), pick: str = "b") -> Decision:
    """A decision for a worker, of three of which two hold a part of the prompt."""
    made = decided(ledger(), held=HELD)
    basis = msgspec.structs.replace(made.basis, excluded=excluded)
    return msgspec.structs.replace(made, basis=basis, worker=pick, pick=(f"{pick}:1",))


def test_warmth_counts_tokens_by_tier_and_what_is_uncertain() -> None:
    basis = decided(ledger(), held=HELD).basis
    shown = warmth_of(basis, 0, idle, 1_000.0).as_json()
    assert shown["certain_tokens"] == {"device": 200, "host": 300, "disk": 0, "remote": 0}
    assert (shown["uncertain_tokens"], shown["speculative_tokens"]) == (50, 0)
    assert shown["share"] == pytest.approx((200 + 0.8 * 300 + 0.5 * 50) / 1000, abs=1e-4)
    assert shown["prefill_seconds"] == pytest.approx(1 - shown["share"], abs=1e-3)


def test_warmth_has_the_seconds_of_a_slow_worker_and_its_queue() -> None:
    made = decided(ledger())
    slow = Load(backlog_tokens=500, slowness=4.0)
    basis = msgspec.structs.replace(made.basis, loads=[None, None, None])
    found = warmth_of(basis, 2, lambda endpoint: slow if endpoint == "c:1" else Load(), 1_000.0)
    assert (found.queue_seconds, found.prefill_seconds, found.share) == (2.0, 4.0, 0.0)


def test_answer_has_the_pick_and_a_warmer_worker_that_may_take_requests() -> None:
    shown = warmth_as_json(with_claims(), QUERY, idle, 1_000.0)
    assert (shown["model"], shown["prompt_tokens"], shown["keyed"]) == ("m", 1000, True)
    assert shown["pick"]["share"] == 0.1
    assert shown["best"]["share"] == pytest.approx(0.465)
    assert "a:1" not in str(shown)


@pytest.mark.parametrize(("why", "is_shown"), [(OVER_LIMIT, True), ("draining", False)])
def test_warmer_worker_is_shown_if_a_request_could_wait_for_it(why: str, is_shown: bool) -> None:
    shown = warmth_as_json(with_claims((why, "", "")), QUERY, idle, 1_000.0)
    assert (shown["best"] is not None) == is_shown


def test_answer_of_a_request_without_a_pick_has_the_warmest_worker_alone() -> None:
    made = msgspec.structs.replace(with_claims(), worker="", pick=())
    shown = warmth_as_json(made, QUERY, idle, 1_000.0)
    assert shown["pick"] is None
    assert shown["best"]["share"] > 0.4
    nothing = msgspec.structs.replace(decided(ledger(), held=NOTHING), worker="", pick=())
    assert warmth_as_json(nothing, QUERY, idle, 1_000.0)["best"] is None


def test_claims_of_a_worker_that_is_gone_are_left_out() -> None:
    made = decided(ledger(), held={"gone": Overlap(10, (90, 0, 0, 0))})
    assert warmth_as_json(made, QUERY, idle, 1_000.0)["best"] is None


def test_of_a_split_request_the_worker_that_computes_counts() -> None:
    made = with_claims(pick="c")
    split = msgspec.structs.replace(made, split=Split(with_claims(pick="a"), "it holds more"))
    assert warm_share(made) == 0.0
    assert warm_share(split) == pytest.approx(0.465)
    assert warmth_as_json(split, QUERY, idle, 1_000.0)["pick"]["share"] == pytest.approx(0.465)


def test_empty_prompt_has_no_share() -> None:
    empty = Query("m", (), "no_body")
    made = decided(ledger(), empty)
    basis = msgspec.structs.replace(made.basis, weighed_tokens=0.0)
    made = msgspec.structs.replace(made, basis=basis)
    assert warm_share(made) == warmth_of(basis, 0, idle, 1_000.0).share == 0.0
    assert warmth_as_json(made, empty, idle, 1_000.0)["reason"] == "no_body"


@given(
    st.integers(1, 3_000),
    st.dictionaries(
        st.sampled_from([one.name for one in WORKERS]),
        st.builds(
            Overlap,
            st.just(16),
            st.tuples(*[st.integers(0, 60)] * 4),
            st.integers(0, 60),
        ),
    ),
)
def test_shares_are_of_the_prompt_and_seconds_are_never_negative(
    tokens: int, held: dict[str, Overlap]
) -> None:
    query = Query("m", [Prompt("m", array("I", range(tokens)))])
    made = decided(ledger(), query, held=held)
    shown = warmth_as_json(made, query, idle, 1_000.0)
    for one in (shown["pick"], shown["best"]):
        if one is not None:
            assert 0 <= one["share"] <= 1
            assert one["queue_seconds"] >= 0 <= one["prefill_seconds"]
    if shown["best"] is not None:
        assert shown["best"]["share"] >= shown["pick"]["share"]
