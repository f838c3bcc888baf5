import json
from array import array
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from extproc.config.schema import Cost, Policy
from extproc.features.fetching.offers import Offers, StoredPrefix
from extproc.features.fetching.term import FetchTerm
from extproc.proof.samples import HANDED
from extproc.requests.outline import beginning_of
from extproc.requests.request import PLAIN_REQUEST
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.claims.claim_table import ClaimTable, Holdings
from extproc.routing.claims.ends import end_of_text
from extproc.routing.claims.homes import Homes
from extproc.routing.cost.survey import Survey
from extproc.routing.cost.term import Charge
from extproc.routing.decide import decide
from extproc.routing.decision import CALLS_NO_MODEL, FINDS_MODEL, Decision, Split, Verdict
from extproc.routing.explain import decided_by, explanation, reason_sentence
from extproc.routing.handing import UNPROVED, Handing
from extproc.routing.inputs.query import Media, MediaItem, Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.endpoint_load import LoadSample
from extproc.routing.load.loads import Load
from extproc.routing.savings.belonging import RESPONSE
from extproc.routing.savings.savings import Savings
from kvstate.overlap import Overlap, Prompt

PROMPT = Prompt("m", array("I", range(100)))
QUERY = Query("m", [PROMPT])
HELD = {"a": Overlap(16, (2, 1, 0, 0), 1)}


def decision(query: Query = QUERY, **fields: Any) -> Decision:
    workers, terms = fields.pop("workers", "ab"), fields.pop("terms", ())
    load = fields.pop("load", Load())
    held = fields.pop("held", HELD)
    defaults: dict[str, Any] = {
        "policy": "cost",
        "turn": 0,
        "rules": Policy(cost=Cost(150, 0, 64)),
    }
    snapshot = Snapshot(
        workers=[Candidate(name, f"{name}:1", "serves n" * (name == "x")) for name in workers],
        overlaps=[held for _ in query.prompts],
        load=fields.pop("load_of", lambda *_: load),
        **(defaults | fields),
    )
    return decide(PLAIN_REQUEST, query, snapshot, 0.0, Random(0), terms)


class Fixed:
    """A term that nobody knows by name."""

    def __init__(self, tokens: Sequence[float]) -> None:
        self._tokens = tokens

    def charge(self, survey: Survey, _: Savings) -> Charge | None:
        return Charge("mine", self._tokens[: len(survey.workers)])


def test_token_ids_are_explained_only_where_they_may_go_along() -> None:
    made = decision()
    assert "token_ids" not in explanation(made, str)
    ids = Handing(UNPROVED, worker="b:1")
    shown = explanation(structs.replace(made, handing=ids), str)["token_ids"]
    assert (shown["handed"], shown["outcome"]) == (False, "unproved")
    assert shown["why"].startswith("its tokens are not proved")
    ids = Handing(HANDED, PROMPT.tokens)
    assert explanation(structs.replace(made, handing=ids), str)["token_ids"]["handed"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=2), st.floats(0, 1e5))
def test_terms_that_are_shown_add_up_to_the_cost_whatever_they_are(
    tokens: list[float], backlog: float
) -> None:
    made = decision(load=Load(2, backlog), terms=[Fixed(tokens)])
    shown = explanation(made, str)["candidates"]
    assert [one["cost_terms"]["mine"] for one in shown] == pytest.approx(tokens, abs=0.001)
    assert [one["cost"] for one in shown] == pytest.approx(list(made.basis.costs), abs=0.01)


def test_explanation_holds_every_term_of_every_cost() -> None:
    load = Load(1, 7.0, 2.0, 0.0, LoadSample(2, 1, 0.0), 0.25)
    shown = explanation(decision(workers="a", load=load), lambda name: f"state of {name}")
    uncached = 100 - 32 - 0.8 * 16 - 8
    assert "-0.0" not in json.dumps(shown)
    assert shown == {
        "model": "m",
        "prompt_tokens": 100,
        "weighed_tokens": 100,
        "policy": "cost",
        "steered": True,
        "held_seconds": 0.0,
        "session": None,
        "candidates": [
            {
                "endpoint": "a:1",
                "name": "a",
                "state": "state of a",
                "overlap_tokens": 48,
                "overlap_blocks": {"device": 2, "host": 1, "disk": 0, "remote": 0},
                "uncertain_tokens": 16,
                "unusable_tokens": 0,
                "speculative_tokens": 0,
                "approximate_tokens": 0,
                "fetch": None,
                "in_flight": 1,
                "cost": pytest.approx(1.5 * uncached + 7 + 3 * 64),
                "cost_terms": {
                    "uncached_tokens": pytest.approx(uncached),
                    "slowness": 1.0,
                    "session": 0.0,
                    "uncached": pytest.approx(1.5 * uncached),
                    "queued": 7.0,
                    "running": 3 * 64.0,
                    "fetched": 0.0,
                    "conversations": 0.0,
                    "patience": 0.0,
                    "siblings": 0.0,
                },
                "reported": {
                    "running": 2,
                    "waiting": 1,
                    "pending_tokens": None,
                    "cache_usage": None,
                    "of_others": 2.0,
                    "age_seconds": 0.25,
                },
                "excluded": None,
                "sampled": True,
            }
        ],
        "pick": ["a:1"],
        "rank": None,
        "verdict": "steer",
        "class": None,
        "reason": "overlap",
        "decided_by": "cache",
        "decided": "",
        "why": "cost: a:1 is expected to hold 48 certain + 16 uncertain of 100 prompt tokens,"
        " cost 270 tokens of work",
        "prefill": None,
        "loads": "",
        "source": None,
        "media": None,
    }


def test_explanation_names_the_items_that_are_known() -> None:
    items = [MediaItem("image", True, True, 256.4), MediaItem("audio", False, False, 1000.0)]
    made = decision()
    media = Media(items, 2_000.0, is_whole=False, text_tokens=9)
    made = structs.replace(made, basis=structs.replace(made.basis, media=media))
    assert explanation(made, lambda _: "live")["media"] == {
        "keyed": False,
        "count": 2,
        "known": 1,
        "items": [
            {"kind": "image", "known": True, "exact": True, "tokens": 256},
            {"kind": "audio", "known": False, "exact": False, "tokens": 1_000},
        ],
    }


def test_reason_sentence_says_how_long_a_request_waited_for_room() -> None:
    made = structs.replace(decision(), held_seconds=41.7)
    assert reason_sentence(made).endswith("; it waited 42 s for room")
    assert explanation(made, lambda _: "live")["held_seconds"] == 41.7


def test_reason_sentence_omits_costs_of_a_split_that_was_not_compared() -> None:
    made = structs.replace(decision(), split=Split(None, "it is short"))
    assert reason_sentence(made).endswith("; it computes the prompt: it is short")


def test_explanation_gives_no_cost_to_workers_outside_the_sample() -> None:
    made = decision(workers="abcdefghx", load=Load(1), sample=2)
    shown = explanation(made, lambda _: "live")["candidates"]
    chosen = {one["endpoint"] for one in shown if one["sampled"]}
    assert {*made.pick, "a:1", "x:1"} <= chosen
    assert len(chosen) <= 4
    for one in shown:
        assert (one["cost"] is None) is (one["endpoint"] not in chosen)
    assert reason_sentence(made).endswith(f"; {len(chosen) - 1} of 9 workers were compared")


def test_explanation_computes_the_cost_of_workers_outside_the_sample_from_their_load() -> None:
    whole = decision(workers="abcdefgh", load=Load(1, 7.0))
    made = decision(workers="abcdefgh", load=Load(1, 7.0), sample=2)
    shown = explanation(made, lambda _: "live", lambda _: Load(1, 7.0))["candidates"]
    assert [one["cost"] for one in shown] == whole.basis.costs


def test_explanation_names_the_cause_that_excludes_a_candidate() -> None:
    shown = explanation(decision(workers="ax"), lambda _: "live")["candidates"]
    assert [one["excluded"] for one in shown] == [None, "serves n"]
    assert shown[1]["reported"] is None


def test_explanation_shows_speculative_and_approximate_tokens_in_fields_of_their_own() -> None:
    sent = ClaimTable(1)
    sent.record(Holdings("a"), sent.marks(PROMPT), 0.0)
    for state, field in (("live", "speculative"), ("stale", "approximate")):
        made = decision(held={}, claims=sent, state=lambda _, s=state: s)
        (shown,) = [
            one for one in explanation(made, lambda _: "")["candidates"] if one["cost"] < 150
        ]
        assert (shown["endpoint"], shown[f"{field}_tokens"]) == ("a:1", 64)
        assert reason_sentence(made).startswith(f"cost: a:1 is expected to hold 64 {field} of 100")


def test_reason_sentence_does_not_add_what_was_sent_to_what_is_uncertain() -> None:
    sent = ClaimTable(1)
    sent.record(Holdings("a"), sent.marks(PROMPT), 0.0)
    told = reason_sentence(decision(claims=sent, state=lambda _: "stale"))
    assert " is expected to hold 48 certain + 16 uncertain or 16 approximate of 100 " in told


def test_reason_sentence_names_the_next_best_worker() -> None:
    assert reason_sentence(decision()).endswith("cost 71 tokens of work; next is b:1 with 150")
    alone = decision(rules=Policy(cost=Cost(150, 0, 64), endpoints=1))
    assert alone.pick == ("a:1",)
    assert reason_sentence(alone).endswith("cost 71 tokens of work; next is b:1 with 150")


def test_reason_sentence_says_what_to_do_about_a_compressed_body() -> None:
    told = reason_sentence(decision(Query("m", reason="unsupported_compression")))
    assert "(unsupported_compression: put Envoy's decompressor before ext_proc), so " in told
    other = reason_sentence(decision(Query("m", reason="odd_json")))
    assert "; without tokens (odd_json), so " in other


def test_reason_sentence_omits_the_cost_for_other_policies() -> None:
    assert reason_sentence(decision(policy="round_robin", held={})) == (
        "round_robin: a:1 is expected to hold none of 100 prompt tokens"
    )


def test_reason_sentence_names_the_choice_of_the_proxy() -> None:
    query = Query(None, reason="body_too_large", proxy_reason=FINDS_MODEL)
    words = "the model is not known here, so the proxy chooses: body_too_large"
    assert reason_sentence(decision(query)) == words
    query = Query(None, reason="not_inference", proxy_reason=CALLS_NO_MODEL)
    assert (
        reason_sentence(decision(query)) == "it calls no model, so the proxy chooses: not_inference"
    )


def test_reason_sentence_names_the_pick_of_an_unsteered_request() -> None:
    left = structs.replace(decision(), is_steered=False)
    assert (
        reason_sentence(left)
        == f"not steered, so the proxy chooses; otherwise {reason_sentence(decision())}"
    )
    refused = decision(Query("m", proxy_reason=CALLS_NO_MODEL, reason="not_inference"))
    assert reason_sentence(structs.replace(refused, is_steered=False)) == reason_sentence(refused)


def test_reason_sentence_names_the_reason_for_missing_tokens() -> None:
    made = decision(Query("m", reason="no_body"), workers="a")
    assert reason_sentence(made) == (
        "cost: a:1 is expected to hold none of 0 prompt tokens, cost 0 tokens of work;"
        " without tokens (no_body), so load alone decided"
    )


def test_reason_sentence_states_that_no_worker_is_eligible() -> None:
    made = decision(workers="x")
    assert (made.verdict, reason_sentence(made)) == (
        Verdict.NO_OVERRIDE,
        "no worker may answer this request",
    )


def test_reason_sentence_states_that_every_worker_is_over_its_limit() -> None:
    made = decision(load=Load(9), rules=Policy(max_in_flight=9, shed=True))
    assert reason_sentence(made) == "every worker that may answer is over its limit of requests"
    shown = explanation(made, lambda _: "live")
    assert (shown["verdict"], shown["candidates"][0]["excluded"]) == (
        "shed",
        "over its limit of requests",
    )


def test_explanation_shows_the_worker_of_a_session_and_its_credit() -> None:
    query = Query("m", reason="body_too_large", unread_bytes=4_000, session="chat 7")
    made = decision(query, held={})
    shown = explanation(made, lambda _: "live")
    terms = {one["endpoint"]: one["cost_terms"]["session"] for one in shown["candidates"]}
    costs = {one["endpoint"]: one["cost"] for one in shown["candidates"]}
    assert shown["session"] == shown["pick"][0]
    assert sorted(terms.values()) == [1.5 * 512, 1.5 * 1024]
    assert costs == {name: pytest.approx(1.5 * 1_000 - term) for name, term in terms.items()}
    assert f"; its session belongs to {made.pick[0]};" in f"{reason_sentence(made)};"


def test_reason_sentence_names_the_worker_of_a_session_that_is_too_busy() -> None:
    query = Query("m", reason="no_body", session="chat 7")
    owner = decision(query, held={}).pick[0]
    busy = {owner: Load(0, 50_000.0)}
    made = decision(query, held={}, load_of=lambda endpoint, _: busy.get(endpoint, Load()))
    assert made.pick[0] != owner
    assert f"its session belongs to {owner}, which is too busy" in reason_sentence(made)


def test_explanation_says_what_decided_without_known_tokens() -> None:
    sent, said = ClaimTable(1), beginning_of(b"word " * 800)
    asked = Query("m", reason="no_tokenizer", outline=said)
    sent.record(Holdings("b"), sent.text_marks("m", beginning_of(b"word " * 400)), 0.0)
    by_texts = decision(asked, held={}, claims=sent)
    assert (by_texts.pick[0], decided_by(by_texts)) == ("b:1", "texts")
    assert reason_sentence(by_texts).endswith(
        "; without tokens (no_tokenizer), so the record of texts decided: about 256 of its 1000"
        " tokens were sent there (26%)"
    )
    by_session = decision(structs.replace(asked, session="s"), held={})
    assert (decided_by(by_session), reason_sentence(by_session)[-19:]) == (
        "session",
        "its session decided",
    )
    by_policy = decision(asked, held={}, policy="random")
    assert (decided_by(by_policy), reason_sentence(by_policy)[-18:]) == (
        "policy",
        "the policy decided",
    )
    assert decided_by(decision(asked, held={}, unfit={"a:1": "x", "b:1": "x"})) == ""


def test_explanation_says_that_a_conversation_decided_where_nothing_is_held() -> None:
    homes, sent, said = Homes(1), ClaimTable(1), beginning_of(b"word " * 400)
    end = end_of_text(sent.text_marks("m", said))
    assert end is not None
    homes.note([end.key], Holdings("b"), 0.0)
    asked = Query("m", reason="no_tokenizer", outline=said)
    made = decision(asked, held={}, homes=homes, claims=sent)
    assert (made.pick[0], decided_by(made)) == ("b:1", "conversation")
    assert reason_sentence(made).endswith("so its conversation decided")


def test_explanation_says_that_only_one_worker_can_continue_a_response() -> None:
    homes = Homes(1)
    homes.note((homes.key(RESPONSE, None, None, "resp_1"),), Holdings("b"), 0.0)
    made = decision(Query("m", reason="x", previous="resp_1"), held={}, homes=homes)
    assert (made.pick, decided_by(made)) == (("b:1",), "response")
    assert "; its previous response is at b:1; " in reason_sentence(made)
    assert reason_sentence(made).endswith("so only the worker that keeps the response can go on")


@pytest.mark.parametrize(
    ("shares", "lately"), [({}, ""), ({"b": 0.5}, ", of which it loaded 50% lately")]
)
def test_reason_names_the_store_from_which_the_pick_would_load(
    shares: dict[str, float], lately: str
) -> None:
    stored = StoredPrefix("s", 90, 1.0, "b", shares)

    def load(endpoint: str, _: float) -> Load:
        return Load(9, 500.0) if endpoint == "a:1" else Load()

    terms = (FetchTerm(Offers(8_000.0, stores=(stored,)), {}, Cost()),)
    made = decision(load_of=load, terms=terms)
    shown = explanation(made, str)
    credit = shown["candidates"][1]["cost_terms"]["fetched"]
    said = f"it would load 90 tokens from the store s{lately}: {credit:.0f} tokens of work less"
    assert (shown["pick"][0], shown["loads"]) == ("b:1", said)
    assert shown["why"].endswith(f"; {said}")
