from array import array
from collections.abc import Mapping
from random import Random
from typing import Any, cast

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.policies import POLICIES, Order, PolicyInput, Ranking
from extproc.config.schema import Cost, Policy
from extproc.requests.outline import beginning_of
from extproc.requests.request import NO_HEAD, PLAIN_REQUEST, RoutingRequest
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.candidates.pins import Pin, PinnedRank, RankChoice
from extproc.routing.candidates.ranks import Ranks
from extproc.routing.claims.claim_table import ClaimTable, Holdings
from extproc.routing.decide import decide
from extproc.routing.decision import FINDS_MODEL, Decision, Verdict, without_room
from extproc.routing.handing import Handing
from extproc.routing.inputs.query import Media, MediaItem, Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Load
from extproc.routing.policy_choice import BUFFERED_ENDPOINTS
from kvstate.overlap import Overlap, Prompt

PROMPT = Prompt("m", array("I", range(100)))


def test_request_without_room_gets_no_ids() -> None:
    made = msgspec.structs.replace(decision(Query("m", [PROMPT])), handing=Handing("handed"))
    assert without_room(made).handing is None


def decision(
    query: Query,
    held: Mapping[str, Overlap] | None = None,
    workers: str = "abcd",
    **fields: Any,
) -> Decision:
    loads = fields.get("loads", {})
    excluded = fields.get("excluded", {})
    snapshot = Snapshot(
        workers=[Candidate(name, f"{name}:1", excluded.get(name, "")) for name in workers],
        overlaps=[held or {} for _ in query.prompts],
        load=lambda endpoint, _: loads.get(endpoint[0], Load()),
        policy=fields.get("policy", "cost"),
        turn=fields.get("turn", 0),
        rules=fields.get("rules", Policy()),
        claims=fields.get("sent"),
        state=fields.get("state", lambda _: "live"),
        unfit=fields.get("unfit", {}),
        ejected=fields.get("ejected", {}),
        ranks=fields.get("ranks"),
        sample=fields.get("sample", 0),
    )
    request = fields.get("request", PLAIN_REQUEST)
    return decide(request, query, snapshot, fields.get("now", 0.0), Random(fields.get("seed", 0)))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.none() | st.integers(1, 10))
def test_pick_names_the_cheapest_workers_as_many_as_configured(
    in_flight: list[int], endpoints: int | None
) -> None:
    names = "abcdefgh"[: len(in_flight)]
    loads = {name: Load(count) for name, count in zip(names, in_flight, strict=True)}
    rules = Policy(endpoints=endpoints)
    made = decision(Query("m", [PROMPT]), workers=names, loads=loads, rules=rules)
    assert len(made.pick) == min(endpoints or BUFFERED_ENDPOINTS, len(names))
    costs = [cost for cost in made.basis.costs if cost is not None]
    picked = [costs[names.index(endpoint[0])] for endpoint in made.pick]
    assert picked == sorted(costs)[: len(picked)]


def test_pick_names_the_worker_that_holds_the_prefix_first_of_three() -> None:
    made = decision(Query("m", [PROMPT]), {"c": Overlap(16, (6, 0, 0, 0))})
    assert (made.pick[0], len(made.pick), made.reason) == ("c:1", 3, "overlap")
    assert (made.basis.certain_tokens, made.uncached_tokens, made.basis.prompt_tokens) == (
        96,
        4,
        100,
    )


@pytest.mark.parametrize(
    ("held", "reason"),
    [({}, "nothing_cached"), ({"a": Overlap(16, uncertain=2)}, "uncertain_overlap")],
)
def test_reason_names_the_claim_behind_the_pick(held: Mapping[str, Overlap], reason: str) -> None:
    assert decision(Query("m", [PROMPT]), held).reason == reason


def test_load_outweighs_an_overlap_that_saves_less() -> None:
    held = {"a": Overlap(16, (2, 0, 0, 0))}
    assert decision(Query("m", [PROMPT]), held, "ab", loads={"a": Load(1)}).pick[0] == "b:1"
    assert decision(Query("m", [PROMPT]), held, "ab", loads={"b": Load(1)}).pick[0] == "a:1"


@pytest.mark.parametrize(("queued", "picked"), [(0.0, "b:1"), (40_000.0, "a:1")])
def test_prefix_weighs_more_where_every_worker_has_a_queue(queued: float, picked: str) -> None:
    held = {"a": Overlap(16, (5, 0, 0, 0))}
    loads = {"a": Load(0, queued + 300.0), "b": Load(0, queued)}
    made = decision(Query("m", [PROMPT]), held, "ab", loads=loads)
    assert made.pick[0] == picked
    assert made.basis.affinity == (1.0 if not queued else 6.0)


def test_affinity_ignores_the_load_of_failing_workers() -> None:
    loads = {name: Load(0, 40_000.0, utilization=0.5) for name in "ab"}
    made = decision(Query("m", [PROMPT]), workers="abc", loads=loads, ejected={"c:1": "fails"})
    assert made.basis.affinity == 7.0
    nobody = dict.fromkeys(["a:1", "b:1", "c:1"], "fails")
    assert (
        decision(Query("m", [PROMPT]), workers="abc", loads=loads, ejected=nobody).basis.affinity
        < 2
    )


def test_cost_adds_up_uncached_tokens_queue_and_requests_in_flight() -> None:
    rules = Policy(cost=Cost(affinity_percent=200, busy_affinity_percent=0, running_tokens=10))
    held = {"a": Overlap(16, (2, 0, 0, 0))}
    loads = {"a": Load(1, 7.0, others=2.0)}
    made = decision(Query("m", [PROMPT]), held, "ab", loads=loads, rules=rules)
    assert made.basis.costs == [2 * (100 - 32) + 7 + 10 * 3, 2 * 100]


def test_cost_accepts_a_longer_wait_for_a_prefix_on_a_busy_fleet() -> None:
    held = {"a": Overlap(16, (6, 0, 0, 0))}
    for utilization, pick in ((0.0, "b:1"), (0.9, "a:1")):
        loads = {
            "a": Load(0, 150.0, utilization=utilization),
            "b": Load(0, 0.0, utilization=utilization),
        }
        assert decision(Query("m", [PROMPT]), held, "ab", loads=loads).pick[0] == pick


def test_decide_adds_up_several_prompts() -> None:
    made = decision(Query("m", [PROMPT, PROMPT]), {"a": Overlap(16, (2, 0, 0, 0))}, "a")
    assert (made.basis.prompt_tokens, made.basis.certain_tokens, made.uncached_tokens) == (
        200,
        64,
        136,
    )


@pytest.mark.parametrize(
    ("prompts", "answers", "is_comparable"),
    [(1, 1, True), (2, 1, False), (1, 2, False), (0, 1, False)],
)
def test_sole_is_the_prompt_of_a_request_with_one_prompt_and_one_answer(
    prompts: int,
    answers: int,
    is_comparable: bool,
) -> None:
    query = Query("m", [PROMPT] * prompts, answers=answers)
    assert query.sole is (PROMPT if is_comparable else None)


def test_query_without_prompts_is_placed_by_load_with_its_reason() -> None:
    made = decision(Query("m", reason="bad_json"))
    assert (len(made.pick), made.reason, made.basis.prompt_tokens) == (3, "bad_json", 0)


def test_round_robin_gives_excluded_workers_no_turn() -> None:
    picks = [
        decision(Query("m"), policy="round_robin", turn=turn, excluded={"a": "x", "c": "x"}).pick[0]
        for turn in range(4)
    ]
    assert picks == ["b:1", "d:1", "b:1", "d:1"]


def test_round_robin_begins_each_pick_at_the_next_worker() -> None:
    picks = [
        decision(Query("m", [PROMPT]), policy="round_robin", turn=turn).pick for turn in range(5)
    ]
    assert [pick[0] for pick in picks] == ["a:1", "b:1", "c:1", "d:1", "a:1"]
    assert picks[3] == ("d:1", "a:1", "b:1")
    assert decision(Query("m"), policy="round_robin").reason == "policy_round_robin"


def test_decision_keeps_excluded_workers_and_picks_none_of_them() -> None:
    made = decision(Query("m", [PROMPT]), workers="ab", excluded={"a": "serves n"})
    assert (made.pick, made.worker) == (("b:1",), "b")
    assert (made.basis.excluded, made.basis.loads[0], made.basis.costs[0]) == (
        ["serves n", ""],
        None,
        None,
    )


def test_decide_overrides_nothing_without_a_worker() -> None:
    made = decision(Query("m", [PROMPT]), workers="")
    assert (made.pick, made.reason, made.worker) == ((), "no_worker", "")
    assert made.verdict is Verdict.NO_OVERRIDE


def within(*endpoints: str) -> RoutingRequest:
    """A request that may go to these endpoints only."""
    return RoutingRequest(msgspec.structs.replace(NO_HEAD, subset=frozenset(endpoints)), None)


def test_decide_refuses_without_a_worker_if_refusal_is_configured() -> None:
    query, rules = Query("m", [PROMPT]), Policy(refuse=True)
    assert decision(query, rules=rules, request=within()).verdict is Verdict.UNAVAILABLE


def test_pick_stays_within_the_subset() -> None:
    query, request = Query("m", [PROMPT]), within("b:1", "d:1")
    assert set(decision(query, request=request).pick) == {"b:1", "d:1"}
    assert decision(query, request=request, unfit={"b:1": "draining"}).pick == ("d:1",)


def test_limit_of_requests_excludes_a_worker_while_another_is_below_it() -> None:
    rules = Policy(max_in_flight=2)
    loads = {"a": Load(2), "b": Load(1, 9e9)}
    made = decision(Query("m", [PROMPT]), workers="ab", loads=loads, rules=rules)
    assert (made.pick, made.basis.excluded) == (("b:1",), ["over its limit of requests", ""])


def test_limit_of_requests_gives_way_where_all_workers_reach_it() -> None:
    loads = {"a": Load(2), "b": Load(1, others=1.0)}
    made = decision(Query("m", [PROMPT]), workers="ab", loads=loads, rules=Policy(max_in_flight=2))
    assert (len(made.pick), made.basis.excluded) == (2, ["", ""])


@pytest.mark.parametrize(
    ("left_out", "picked", "excluded"),
    [
        ({"a:1"}, {"b:1"}, ["answers request after request with failures", ""]),
        ({"a:1", "b:1"}, {"a:1", "b:1"}, ["", ""]),
        ({"c:1"}, {"a:1", "b:1"}, ["", ""]),
    ],
)
def test_ejected_worker_is_picked_only_where_all_are_ejected(
    left_out: set[str], picked: set[str], excluded: list[str]
) -> None:
    held = {"a": Overlap(16, (9, 0, 0, 0))}
    why = dict.fromkeys(left_out, "answers request after request with failures")
    made = decision(Query("m", [PROMPT]), workers="ab", held=held, ejected=why)
    assert (set(made.pick), made.basis.excluded) == (picked, excluded)


@pytest.mark.parametrize(
    ("query", "tokens"),
    [
        (Query("m", reason="body_too_large", unread_bytes=4_000), 1_000),
        (Query("m", reason="body_too_large", unread_bytes=1 << 30), 32_768),
        (Query("m", reason="too_many_bytes", outline=beginning_of(b"x" * 400)), 100),
        (Query(None, reason="not_inference"), 0),
    ],
)
def test_unread_prompt_weighs_by_its_length(query: Query, tokens: int) -> None:
    assert decision(query).basis.weighed_tokens == tokens


def test_decide_leaves_a_request_to_the_proxy_that_finds_its_model() -> None:
    query = Query(None, reason="body_too_large", proxy_reason=FINDS_MODEL)
    made = decision(query, workers="ab", rules=Policy(refuse=True))
    assert (made.pick, made.verdict, made.reason) == ((), Verdict.NO_OVERRIDE, "body_too_large")
    assert set(made.basis.excluded) == {"the model is not known here, so the proxy chooses"}


def test_decide_sheds_a_request_over_all_limits_if_shedding_is_configured() -> None:
    rules = Policy(max_in_flight=2, shed=True)
    made = decision(Query("m", [PROMPT]), workers="a", loads={"a": Load(2)}, rules=rules)
    assert (made.pick, made.verdict, made.reason) == ((), Verdict.SHED, "shed")


def sent_to(
    worker: str, query: Query, now: float = 0.0, sent: ClaimTable | None = None
) -> ClaimTable:
    """A table that records that this query was sent to the worker."""
    sent = sent or ClaimTable(1)
    for marks in decision(query, sent=sent).marks:
        sent.record(Holdings(worker), marks, now)
    return sent


def test_request_follows_its_siblings_before_their_events() -> None:
    sent = sent_to("c", Query("m", [PROMPT]))
    made = decision(Query("m", [PROMPT]), sent=sent)
    assert (made.pick[0], made.reason) == ("c:1", "speculative_overlap")
    assert made.basis.claims["c"].speculative == 64
    assert made.basis.certain_tokens == 0
    assert made.uncached_tokens == pytest.approx(100 - 0.9 * 64)


def test_worker_without_events_is_credited_with_the_prompts_sent_to_it() -> None:
    sent = sent_to("c", Query("m", [PROMPT]))
    made = decision(Query("m", [PROMPT]), sent=sent, state=lambda _: "unsupported", now=300.0)
    assert (made.pick[0], made.reason) == ("c:1", "approximate_overlap")


def test_certain_overlap_is_preferred_to_an_approximate_one() -> None:
    sent = sent_to("c", Query("m", [PROMPT]))
    held = {"b": Overlap(16, (4, 0, 0, 0))}
    state = {"b": "live"}
    made = decision(
        Query("m", [PROMPT]), held, sent=sent, state=lambda name: state.get(name, "unsupported")
    )
    assert made.pick[:2] == ("b:1", "c:1")


def test_text_without_tokens_is_compared_with_earlier_text() -> None:
    text = b"a long system prompt " * 50
    first = Query("m", reason="no_tokenizer", outline=beginning_of(text))
    sent = sent_to("c", first)
    outline = beginning_of(text + b"and a question")
    longer = Query("m", reason="no_tokenizer", outline=outline)
    made = decision(longer, sent=sent, state=lambda _: "unsupported")
    assert (made.pick[0], made.reason, made.basis.prompt_tokens) == ("c:1", "no_tokenizer", 0)
    assert made.basis.weighed_tokens == outline.tokens == (len(text) + 14) / 4
    unknown = msgspec.structs.replace(longer, salt="")
    made = decision(unknown, sent=sent, state=lambda _: "unsupported")
    assert (made.uncached_tokens, made.marks) == (made.basis.weighed_tokens, ())


def test_request_that_reads_no_cache_weighs_all_its_tokens() -> None:
    held = {"c": Overlap(16, (6, 0, 0, 0))}
    made = decision(Query("m", [PROMPT], "reads_no_cache", reads_cache=False), held)
    assert (made.uncached_tokens, made.reason) == (len(PROMPT.tokens), "reads_no_cache")
    assert not made.basis.claims


def test_feed_that_recovers_is_credited_again() -> None:
    sent = sent_to("c", Query("m", [PROMPT]))
    for state, found in (("live", set()), ("stale", {"c"}), ("live", set())):
        made = decision(Query("m", [PROMPT]), sent=sent, state=lambda _, s=state: s, now=100.0)
        assert {name for name, claims in made.basis.claims.items() if claims.saved} == found


def burst(count: int, workers: str, utilization: float = 0.0) -> list[str]:
    """Where siblings go that share 6,000 tokens and arrive at once, before any event of theirs."""
    sent, loads = ClaimTable(1), {worker: Load(utilization=utilization) for worker in workers}
    picked = []
    for number in range(count):
        prompt = Prompt("m", array("I", [*range(6000), *[number] * 1200]))
        made = decision(Query("m", [prompt]), None, workers, sent=sent, loads=loads)
        before = loads[made.worker]
        loads[made.worker] = msgspec.structs.replace(
            before,
            in_flight=before.in_flight + 1,
            backlog_tokens=before.backlog_tokens + made.uncached_tokens,
        )
        sent.record(Holdings(made.worker), made.marks[0], 0.0)
        picked.append(made.worker)
    return picked


def test_small_burst_of_siblings_stays_together_on_a_busy_fleet() -> None:
    assert len(set(burst(3, "abcdefgh", utilization=0.5))) == 1


@pytest.mark.parametrize("utilization", [0.0, 0.9])
def test_large_burst_of_siblings_does_not_herd(utilization: float) -> None:
    picked = burst(64, "abcd", utilization)
    assert all(12 <= picked.count(worker) <= 20 for worker in "abcd")


MANY = "abcdefghijklmnopqrstuvwxyz"


def looked_at(made: Decision) -> set[str]:
    assert made.basis.sampled is not None
    return {MANY[place] for place in made.basis.sampled}


def test_sample_includes_every_holder_of_the_prompt_and_a_few_drawn_workers() -> None:
    held = {"c": Overlap(16, (6, 0, 0, 0)), "d": Overlap(16, uncertain=2)}
    query = Query("m", [PROMPT])
    sent = sent_to("e", query)
    drawn = []
    for seed in range(50):
        made = decision(query, held, MANY, sent=sent, sample=3, seed=seed)
        looked = looked_at(made)
        assert {"c", "d", "e"} <= looked
        assert len(looked) <= 6
        assert [load is None for load in made.basis.loads] == [name not in looked for name in MANY]
        drawn += sorted(looked - {"c", "d", "e"})
    assert set(drawn) == set(MANY) - {"c", "d", "e"}


def test_sample_draws_a_few_of_many_equal_holders() -> None:
    held = dict.fromkeys(MANY[:20], Overlap(16, (1, 0, 0, 0))) | {"z": Overlap(16, (6, 0, 0, 0))}
    made = decision(Query("m", [PROMPT]), held, MANY, sample=4)
    assert made.pick[0] == "z:1"
    assert len(looked_at(made)) <= 4 + 4 + 1


def test_sample_is_not_drawn_from_a_few_workers() -> None:
    for count in (0, 4, 9):
        made = decision(Query("m", [PROMPT]), sample=count)
        assert made.basis.sampled is None
        assert None not in made.basis.costs


@pytest.mark.parametrize("policy", ["least_request", "round_robin", "cache_aware", "random"])
def test_sample_is_drawn_by_the_cost_policy_only(policy: str) -> None:
    assert (
        decision(Query("m", [PROMPT]), workers=MANY, policy=policy, sample=2).basis.sampled is None
    )


def test_sample_leaves_out_excluded_and_ejected_workers() -> None:
    held = {"a": Overlap(16, (6, 0, 0, 0)), "b": Overlap(16, (6, 0, 0, 0))}
    for seed in range(20):
        made = decision(
            Query("m", [PROMPT]),
            held | {"gone": Overlap(16, (6, 0, 0, 0))},
            MANY,
            excluded={"a": "serves n"},
            ejected=dict.fromkeys([f"{name}:1" for name in "bcdefghijklmnopqrstuvw"], "down"),
            sample=2,
            seed=seed,
        )
        assert looked_at(made) - {"b"} < set("xyz")
        assert set(made.pick) < {"x:1", "y:1", "z:1"}


def test_sample_is_drawn_from_all_where_every_worker_is_ejected() -> None:
    ejected = dict.fromkeys([f"{name}:1" for name in MANY], "down")
    made = decision(Query("m", [PROMPT]), {}, MANY, ejected=ejected, sample=2)
    assert (len(made.pick), len(looked_at(made))) == (2, 2)


@pytest.mark.parametrize("shed", [False, True])
def test_sample_over_its_limit_neither_overloads_nor_refuses(
    shed: bool,
) -> None:
    rules = Policy(max_in_flight=2, shed=shed)
    loads = dict.fromkeys(MANY, Load(2)) | {"q": Load(1)}
    for seed in range(10):
        made = decision(
            Query("m", [PROMPT]), None, MANY, loads=loads, rules=rules, sample=2, seed=seed
        )
        assert made.pick[0] == "q:1"


def test_rank_is_not_named_where_an_undrawn_worker_lacks_it() -> None:
    held = {"c": Overlap(16, (6, 0, 0, 0), rank=1)}
    for seed in range(5):
        made = decision(Query("m", [PROMPT]), held, MANY, ranks=ranks(z=1), sample=1, seed=seed)
        assert made.rank is None


def test_least_request_ignores_overlap_and_cache_aware_follows_it() -> None:
    held = {"c": Overlap(16, (6, 0, 0, 0))}
    loads = {"c": Load(1)}
    made = decision(Query("m", [PROMPT]), held, loads=loads, policy="least_request")
    assert (made.pick[0] != "c:1", made.reason) == (True, "policy_least_request")
    made = decision(Query("m", [PROMPT]), held, loads=loads, policy="cache_aware")
    assert (made.pick[0], made.reason) == ("c:1", "overlap")


def test_snapshot_takes_feeds_of_unknown_state_for_live() -> None:
    sent = sent_to("a", Query("m", [PROMPT]))
    workers = [Candidate("a", "a:1")]
    snapshot = Snapshot(workers, [{}], lambda *_: Load(), "cost", 0, claims=sent)
    assert (
        decide(PLAIN_REQUEST, Query("m", [PROMPT]), snapshot, 0.0, Random(0))
        .basis.claims["a"]
        .speculative
        == 64
    )


PATH = "/v1/completions"
NAMED = PinnedRank(1, Pin("x-rank"), PATH)


def ranks(count: int = 2, work: Mapping[int, float] | None = None, **others: int) -> Ranks:
    return Ranks(lambda name: others.get(name, count), lambda *_: work or {}, choice, PATH)


def choice(worker: str) -> RankChoice:
    return RankChoice(Pin("x-rank"), worker != "b")


def test_rank_that_holds_the_prefix_is_named() -> None:
    held = {"c": Overlap(16, (6, 0, 0, 0), rank=1)}
    assert decision(Query("m", [PROMPT]), held).rank is None
    assert decision(Query("m", [PROMPT]), held, ranks=ranks()).rank == NAMED
    assert decision(Query("m", [PROMPT]), {}, ranks=ranks()).rank is None
    assert decision(Query("m", [PROMPT]), held, "", ranks=ranks()).rank is None


def test_rank_is_named_only_where_every_eligible_worker_has_it() -> None:
    held = {"c": Overlap(16, (6, 0, 0, 0), rank=1)}
    assert decision(Query("m", [PROMPT]), held, ranks=ranks(a=1)).rank is None
    without = {"a": "draining"}
    made = decision(Query("m", [PROMPT]), held, ranks=ranks(a=1), excluded=without)
    assert made.rank == NAMED


def test_rank_is_not_named_where_its_work_exceeds_its_saving() -> None:
    held = {"c": Overlap(16, (6, 0, 0, 0), rank=1)}
    assert decision(Query("m", [PROMPT]), held, ranks=ranks(work={1: 95.0})).rank == NAMED
    made = decision(Query("m", [PROMPT]), held, ranks=ranks(work={1: 97.0}))
    assert made.rank is None
    # the engine may take the other rank, so nothing is certain
    assert (made.basis.certain_tokens, made.basis.uncertain_tokens, made.reason) == (
        0,
        96,
        "uncertain_overlap",
    )
    assert made.basis.overlaps == [{"c": Overlap(16, uncertain=6, rank=1)}]


BLIND = Query("m", reason="body_too_large", unread_bytes=40_000, session="chat 7")


def test_session_without_known_tokens_keeps_its_two_workers() -> None:
    owner, second, *_ = decision(BLIND).pick
    for seed in range(20):
        assert decision(BLIND, seed=seed).pick[:2] == (owner, second)
        assert decision(BLIND, seed=seed, workers="dcba").pick[:2] == (owner, second)
    others = {
        decision(msgspec.structs.replace(BLIND, session=str(number))).pick[0]
        for number in range(50)
    }
    assert len(others) == 4


def test_session_keeps_its_workers_whatever_their_names() -> None:
    named = [Candidate(f"pod-{name}", f"{name}:1") for name in "abcd"]
    here = Snapshot(named, [], lambda *_: Load(), "cost", 0)
    for number in range(20):
        query = msgspec.structs.replace(BLIND, session=str(number))
        assert (
            decide(PLAIN_REQUEST, query, here, 0.0, Random(0)).pick[:2] == decision(query).pick[:2]
        )


def test_session_goes_to_its_second_worker_where_the_first_is_busy_or_fails() -> None:
    made = decision(BLIND)
    owner, second = made.worker, made.pick[1]
    assert decision(BLIND, loads={owner: Load(3)}).worker == owner
    assert decision(BLIND, loads={owner: Load(0, 100_000.0)}).pick[0] == second
    assert decision(BLIND, ejected={made.pick[0]: "fails"}).pick[0] == second
    assert decision(BLIND, unfit={made.pick[0]: "draining"}).pick[0] == second
    full = {owner: Load(9)}
    assert decision(BLIND, loads=full, rules=Policy(max_in_flight=9)).pick[0] == second
    everybody = dict.fromkeys([f"{name}:1" for name in "abcd"], "fails")
    assert decision(BLIND, ejected=everybody).worker == owner


def test_session_counts_with_every_overlap_policy_and_in_a_sample() -> None:
    owner = decision(BLIND).worker
    for policy in ("cache_aware", "prefix_cache"):
        assert decision(BLIND, policy=policy).worker == owner
    assert {decision(BLIND, sample=1, seed=seed).worker for seed in range(20)} == {owner}


@pytest.mark.parametrize(
    "query",
    [
        Query("m", [PROMPT], session="chat 7"),
        msgspec.structs.replace(BLIND, session="x" * 257),
        msgspec.structs.replace(BLIND, reads_cache=False),
        msgspec.structs.replace(BLIND, proxy_reason="it calls no model"),
    ],
    ids=["tokens known", "too long", "reads no cache", "left to the proxy"],
)
def test_session_counts_for_nothing_where_tokens_are_known(query: Query) -> None:
    assert decision(query).basis.belonging.credit == {}


def test_request_with_unknown_media_is_weighed_by_it_and_expects_what_was_sent() -> None:
    media = Media([], 5_000.0, is_whole=False, text_tokens=9)
    whole_media = Media([], 5_000.0, is_whole=True, text_tokens=9)
    query = Query("m", [PROMPT], media=media)
    sent = sent_to("a", query)
    made = decision(query, sent=sent)
    whole = decision(Query("m", [PROMPT], media=whole_media), sent=sent)
    assert (made.basis.weighed_tokens, whole.basis.weighed_tokens) == (5_000.0, 5_000.0)
    assert made.basis.claims["a"].approximate > 0
    assert decision(Query("m", [PROMPT])).basis.weighed_tokens == 100.0


def test_worker_with_one_rank_needs_none_named() -> None:
    held = {"a": Overlap(16, (6, 0, 0, 0))}
    made = decision(Query("m", [PROMPT]), held, workers="a", ranks=ranks(1))
    assert (made.rank, made.basis.certain_tokens) == (None, 96)


@pytest.mark.parametrize(("exact", "whole", "known"), [(1, 1, 1), (0, 1, 0), (1, 0, 0)])
def test_media_are_known_if_whole_and_exact(exact: int, whole: int, known: int) -> None:
    item = MediaItem("image", True, bool(exact), 256.0)
    assert Media([item], 300.0, bool(whole), 9).is_known == bool(known)


def test_policy_gets_what_the_request_and_its_candidates_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def by_header(columns: PolicyInput) -> Order:
        named = (columns.session.encode(), columns.header)
        return [0.0 if one.encode() in named else 1.0 for one in columns.endpoints()]

    ranking = Ranking(by_header, reads_header="a.key")
    monkeypatch.setitem(cast("dict[str, Ranking]", POLICIES), "random", ranking)
    head = msgspec.structs.replace(NO_HEAD, session="c:1")
    for request, session in (
        (RoutingRequest(NO_HEAD, None, policy_headers={"a.key": b"c:1", "another": b"b:1"}), ""),
        (RoutingRequest(head, None), ""),
        (PLAIN_REQUEST, "c:1"),
    ):
        query = Query("m", session=session)
        made = decision(query, policy="random", excluded={"a": "x"}, request=request)
        assert made.pick[0] == "c:1"
