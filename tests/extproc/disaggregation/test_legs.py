import json
from array import array
from collections.abc import Mapping
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.schema import Policy
from extproc.config.sections import Disaggregation
from extproc.disaggregation.legs import COMPUTES_FOR_OTHERS, WORDS, decide_legs, with_source
from extproc.disaggregation.transfer_fields import (
    MAX_EDITED_BYTES,
    Transfer,
    edited,
    may_split,
    pulled,
    transfer,
)
from extproc.requests.request import NO_HEAD, PLAIN_REQUEST, RoutingRequest
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.decide import decide
from extproc.routing.decision import Decision, Verdict
from extproc.routing.explain import explanation, reason_sentence
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Load
from kvstate.overlap import Overlap, Prompt, Tokens

ROLES = {"p": "prefill", "q": "prefill", "d": "decode", "e": "decode", "b": "both"}
QUERY = Query("m", [Prompt("m", array("I", range(4000)))])
POLICY = Policy()
BUSY = Load(in_flight=8)
HEADER = Disaggregation("header", "offloading")
SGLANG = Disaggregation("mirror", "sglang")


def decided(
    workers: str = "pqd",
    loads: Mapping[str, Load] | None = None,
    held: Mapping[str, int] | None = None,
    query: Query = QUERY,
    rules: Disaggregation = HEADER,
    policy_rules: Policy = POLICY,
    request: RoutingRequest = PLAIN_REQUEST,
    **more: Any,
) -> Decision:
    """Decides; held: the number of blocks of 16 tokens, by worker."""
    known = loads or {}
    overlaps = {name: Overlap(16, (blocks, 0, 0, 0)) for name, blocks in (held or {}).items()}
    snapshot = Snapshot(
        workers=[Candidate(name, f"{name}:1", role=ROLES[name]) for name in workers],
        overlaps=[overlaps for _ in query.prompts],
        load=lambda endpoint, _: known.get(endpoint[0], Load()),
        policy="cost",
        turn=0,
        rules=policy_rules,
        **more,
    )
    return decide_legs(request, query, snapshot, rules, 0.0, Random(0))


def legs(made: Decision) -> tuple[str, str]:
    """Returns the worker that answers and the one that computes for it, "" if none does."""
    prefill = made.prefill
    return made.worker, "" if prefill is None else prefill.worker


def outcome_of(made: Decision) -> str:
    assert made.split is not None
    return made.split.outcome


def test_busy_decode_worker_leaves_a_long_prompt_to_a_prefill_worker() -> None:
    made = decided(loads={"d": BUSY})
    assert legs(made) in {("d", "p"), ("d", "q")}
    assert made.pick == ("d:1",)


def test_idle_decode_worker_computes_the_prompt_itself() -> None:
    assert legs(decided()) == ("d", "")


def test_queued_prefill_workers_leave_the_prompt_to_the_decode_worker() -> None:
    queued = Load(1, 100_000.0)
    assert legs(decided(loads={"d": BUSY, "p": queued, "q": queued})) == ("d", "")
    assert legs(decided(loads={"d": BUSY, "p": queued})) == ("d", "q")


def test_prefill_worker_is_picked_by_its_overlap() -> None:
    for name in "pq":
        assert legs(decided(loads={"d": BUSY}, held={name: 200})) == ("d", name)


def test_overlap_of_the_decode_worker_keeps_the_prompt_there() -> None:
    made = decided(loads={"d": BUSY}, held={"d": 243})
    assert legs(made) == ("d", "")
    assert made.split is not None
    assert "fewer than 128" in made.split.reason


def test_slow_transfer_keeps_the_prompt_on_the_decode_worker() -> None:
    rules = Disaggregation("header", transfer_tokens_per_second=1_000)
    assert legs(decided(loads={"d": Load(4)}, rules=rules)) == ("d", "")
    assert legs(decided(loads={"d": Load(4)}))[1] != ""


def test_split_ignores_a_slowness_common_to_the_fleet() -> None:
    for slowness in (0.5, 1.0, 3.0):
        loads = {name: Load(4 * (name == "d"), slowness=slowness) for name in "dpq"}
        assert legs(decided(loads=loads))[1] != ""
        made = decided(loads=loads | {"d": Load(0, slowness=slowness)})
        assert legs(made) == ("d", "")
    slow = {"d": Load(1, slowness=4.0)}
    assert outcome_of(decided(loads=slow)) == "apart"


def test_split_weighs_a_slow_decode_worker_by_its_slowness() -> None:
    made = decided(loads={"d": Load(1, slowness=4.0)})
    assert made.split is not None
    assert made.split.cost_alone == pytest.approx(4.0 * 4000 * 1.5)


def test_split_names_its_outcome_by_its_cause() -> None:
    busy, whole = {"d": BUSY}, {"b": Load()} | {"d": BUSY}
    assert outcome_of(decided(loads=busy)) == "apart"
    assert outcome_of(decided("pd", rules=SGLANG)) == "needed"
    assert outcome_of(decided()) == "here"
    assert outcome_of(decided(loads=busy, held={"d": 243})) == "few_tokens"
    assert outcome_of(decided("pdb", loads=whole)) == "whole"
    assert outcome_of(decided("d")) == "no_prefill_worker"
    assert outcome_of(decided(rules=Disaggregation())) == "not_set"


def test_worker_of_both_roles_takes_whole_requests_only() -> None:
    made = decided("pqb", loads={"b": BUSY})
    assert legs(made) == ("b", "")
    assert legs(decided("pqdb", loads={"d": BUSY})) == ("b", "")


def test_prefill_workers_are_never_picked_to_answer() -> None:
    made = decided("pq")
    assert (made.pick, made.verdict) == ((), Verdict.NO_OVERRIDE)
    assert set(made.basis.excluded) == {COMPUTES_FOR_OTHERS}


@pytest.mark.parametrize(
    ("query", "outcome"),
    [
        (msgspec.structs.replace(QUERY, answers=2), "several_answers"),
        (msgspec.structs.replace(QUERY, prompts=list(QUERY.prompts) * 2), "several_prompts"),
        (Query("m"), "no_prompt"),
    ],
)
def test_split_gives_one_leg_to_requests_that_cannot_have_two(query: Query, outcome: str) -> None:
    made = decided(loads={"d": BUSY}, query=query)
    assert legs(made) == ("d", "")
    assert made.split is not None
    assert (made.split.outcome, made.split.reason) == (outcome, WORDS[outcome])


def test_split_gives_one_leg_to_a_request_whose_body_cannot_name_the_other() -> None:
    made = decided(loads={"d": BUSY}, may_split=False)
    assert legs(made) == ("d", "")
    assert made.split is not None
    assert made.split.outcome == "body"


def test_split_needs_a_configured_mode() -> None:
    assert legs(decided(loads={"d": BUSY}, rules=Disaggregation())) == ("d", "")


def test_split_leaves_out_unfit_prefill_workers() -> None:
    busy = {"d": BUSY}
    assert legs(decided(loads=busy, ejected={"p:1": "dead"})) == ("d", "q")
    assert legs(decided(loads=busy, unfit={"q:1": "draining"})) == ("d", "p")
    assert legs(decided(loads=busy, unfit={"q:1": "draining"}, ejected={"p:1": "x"})) == ("d", "")
    head = msgspec.structs.replace(NO_HEAD, subset=frozenset({"d:1", "q:1"}))
    assert legs(decided(loads=busy, request=RoutingRequest(head, None))) == ("d", "q")


def test_doubted_prefill_worker_is_used_only_where_all_are_doubted() -> None:
    busy = {"d": BUSY}
    assert legs(decided(loads=busy, held={"p": 200}, doubted=["p:1"])) == ("d", "q")
    assert legs(decided(loads=busy, held={"p": 200}, doubted=["p:1", "q:1"])) == ("d", "p")
    assert legs(decided("pd", loads=busy, doubted=["p:1", "d:1"])) == ("d", "p")


def test_retry_of_two_legs_finds_decode_workers_only() -> None:
    made = decided("pdeb", loads={"d": BUSY, "e": BUSY, "b": Load(9, 50_000.0)})
    assert legs(made)[1] == "p"
    assert set(made.pick) == {"d:1", "e:1"}


def test_sglang_never_computes_on_a_decode_worker() -> None:
    assert legs(decided("pd", rules=SGLANG)) == ("d", "p")
    assert legs(decided("pd", rules=SGLANG, held={"d": 249})) == ("d", "p")
    made = decided("pdb", rules=SGLANG, ejected={"p:1": "dead"})
    assert (legs(made), made.pick) == (("b", ""), ("b:1",))
    assert "cannot compute" in made.basis.excluded[1]


def test_sglang_retries_a_whole_request_on_workers_of_both_roles_only() -> None:
    made = decided("pdb", rules=SGLANG, loads={"d": BUSY})
    assert (legs(made), made.pick) == (("b", ""), ("b:1",))


def test_sglang_splits_batches_and_requests_without_a_prompt() -> None:
    batch = msgspec.structs.replace(QUERY, prompts=list(QUERY.prompts) * 2)
    assert legs(decided("pd", rules=SGLANG, query=batch)) == ("d", "p")
    assert legs(decided("pd", rules=SGLANG, query=Query("m"))) == ("d", "")


def test_sglang_without_a_prefill_worker_is_left_to_the_proxy() -> None:
    made = decided("d", rules=SGLANG)
    assert (made.pick, made.verdict) == ((), Verdict.NO_OVERRIDE)


def test_prefill_workers_over_their_limit_are_used_where_all_are() -> None:
    full = {"p": Load(9), "q": Load(9), "d": Load(1)}
    policy = Policy(max_in_flight=4, shed=True)
    assert legs(decided(loads=full, rules=SGLANG, policy_rules=policy))[1] in {"p", "q"}


def test_explanation_shows_both_legs_and_the_cause() -> None:
    made = decided(loads={"d": BUSY})
    shown = explanation(made, lambda _: "live")["prefill"]
    assert shown["pick"] in {"p:1", "q:1"}
    assert shown["cost"]["here"] > shown["cost"]["apart"] > 0
    assert [one["endpoint"] for one in shown["candidates"]] == ["p:1", "q:1"]
    assert "computes the prompt: computing the prompt elsewhere costs less" in reason_sentence(made)
    whole = explanation(decided(), lambda _: "live")["prefill"]
    assert (whole["pick"], "candidates" in whole) == (None, False)
    assert "it computes the prompt" in reason_sentence(decided())


def pulling(
    held: Mapping[str, int], query: Query = QUERY, ports: str = "abc", **known: object
) -> Decision:
    """Decides among plain workers by round robin, so the first one is picked.

    held: the number of blocks of 16 tokens, by worker. ports: the workers that hand blocks over.
    """
    overlaps = {name: Overlap(16, (blocks, 0, 0, 0)) for name, blocks in held.items()}
    workers = [
        Candidate(name, f"{name}:1", transfer_port=5710 if name in ports else None)
        for name in "abc"
    ]
    snapshot = Snapshot(workers, [overlaps for _ in query.prompts], idle, "round_robin", 0)
    snapshot = msgspec.structs.replace(snapshot, **known)
    made = decide(PLAIN_REQUEST, query, snapshot, 0.0, Random(0))
    return with_source(query, made, 512, snapshot)


def idle(*_: object) -> Load:
    return Load()


def test_source_names_the_worker_that_holds_much_more_than_the_pick() -> None:
    made = pulling({"a": 10, "b": 100, "c": 200})
    assert made.source == ("c:1", 5710, 190 * 16)
    assert made.pick == ("a:1", "b:1")
    assert made.uncached_tokens == 4000 - 200 * 16
    assert explanation(made, lambda _: "live")["source"]["endpoint"] == "c:1"
    assert "it pulls 3040 tokens from c:1" in reason_sentence(made)


def test_source_is_none_where_pulling_saves_little_or_is_impossible() -> None:
    assert pulling({"a": 10, "b": 41}).source is None
    assert pulling({"a": 200, "b": 10}).source is None
    assert pulling({}).source is None
    assert pulling({"b": 100}, ports="ac").source is None
    assert pulling({"b": 100}, ports="bc").source is None
    assert pulling({"b": 100, "c": 90}, ejected={"b:1": "fails"}).source == ("c:1", 5710, 90 * 16)
    assert pulling({"b": 100}, may_split=False).source is None
    for query in (
        msgspec.structs.replace(QUERY, answers=2),
        msgspec.structs.replace(QUERY, reads_cache=False),
        Query("m"),
    ):
        assert pulling({"b": 100}, query).source is None


SNAPSHOT = Snapshot([], [], idle, "cost", 0)


def test_source_is_none_for_a_request_of_two_legs() -> None:
    made = decided(loads={"d": BUSY}, held={"p": 200})
    assert with_source(QUERY, made, 1, SNAPSHOT) is made
    nobody = decided("p")
    assert with_source(QUERY, nobody, 1, SNAPSHOT) is nobody


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = b'{ "model": "m",\n "messages": [{"role": "user", "content": "a\\u00e4"}], "n": 1 }\n'
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)


def members(part: bytes) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(b"{" + part + b"}")
    return read


def sent(
    body: bytes, fields: Transfer, tokens: Tokens | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The bodies that both workers read: Envoy's filter makes the second from the first."""
    change = edited(body, fields, tokens)
    assert change is not None
    decode = json.loads(bytes(change.body))
    if not change.tail:
        return decode, decode
    cut, _, tail = change.tail.partition(":")
    return decode, json.loads(bytes(change.body)[: -int(cut)] + tail.encode())


def test_sglang_transfer_names_one_room_in_both_bodies() -> None:
    fields = transfer("sglang", "10.0.0.1:8000", 8998, CHAT, [77])
    decode, prefill = sent(BODY, fields)
    assert decode == prefill == json.loads(BODY) | {
        "bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 77,
    }  # fmt: skip


def test_sglang_transfer_names_a_room_for_each_prompt() -> None:
    fields = members(transfer("sglang", "[::1]:8000", 8998, COMPLETIONS, [7, 8]).decode)
    assert fields == {
        "bootstrap_host": ["::1", "::1"],
        "bootstrap_port": [8998, 8998],
        "bootstrap_room": [7, 8],
    }


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_offloading_transfer_asks_the_prefill_worker_for_one_token(path: str) -> None:
    decode, prefill = sent(BODY, transfer("offloading", "10.0.0.1:8000", 7777, path, [255]))
    number = f"{255:016x}"
    assert decode == json.loads(BODY) | {
        "kv_transfer_params": {
            "remote_prefiller": {
                "kv_request_id": number, "remote_host": "10.0.0.1", "remote_port": 7777,
            },
        },
    }  # fmt: skip
    assert prefill["kv_transfer_params"] == {"remote_decoder": {"kv_request_id": number}}
    assert (prefill["max_tokens"], prefill["stream"], prefill["stream_options"]) == (1, False, None)
    assert ("max_completion_tokens" in prefill) is (path == CHAT)
    assert prefill["messages"] == decode["messages"]


def test_mooncake_transfer_names_the_engine_and_its_bootstrap_server() -> None:
    fields = transfer("mooncake", "[::1]:8000", 8998, COMPLETIONS, [1])
    here = members(fields.decode)["kv_transfer_params"]
    there = members(fields.prefill)["kv_transfer_params"]
    assert here["remote_bootstrap_addr"] == "http://[::1]:8998"
    assert here["remote_engine_id"] == "[::1]:8000"
    assert (here["do_remote_prefill"], there["do_remote_decode"]) == (True, True)
    assert here["transfer_id"] == there["transfer_id"]


FIELDS = transfer("sglang", "10.0.0.1:8000", 8998, CHAT, [77])


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=5), st.sampled_from(["", " ", "\n\t"]))
def test_edited_keeps_every_other_byte_of_the_body(members: dict[str, Any], space: str) -> None:
    body = (json.dumps(members) + space).encode()
    change = edited(body, FIELDS)
    assert change is not None
    before = body.rstrip()[:-1]
    written = bytes(change.body)
    assert written.startswith(before)
    assert written.removeprefix(before).lstrip(b",") == FIELDS.decode + b"}"


def test_both_workers_get_the_ids_of_the_prompt_beside_their_own_fields() -> None:
    fields = transfer("offloading", "10.0.0.1:8000", 7777, CHAT, [255])
    decode, prefill = (one["kv_transfer_params"] for one in sent(BODY, fields, array("I", [5, 77])))
    assert decode.pop("prompt_token_ids") == prefill.pop("prompt_token_ids") == [5, 77]
    assert (list(decode), list(prefill)) == (["remote_prefiller"], ["remote_decoder"])


def test_ids_stay_where_no_field_takes_them() -> None:
    decode, _ = sent(BODY, FIELDS, array("I", [5]))
    assert "kv_transfer_params" not in decode


@pytest.mark.parametrize("body", [b"", b"[]", b"\xff", b"[" * 100_000, b"{}x", b"x{}", b"{"])
def test_edited_refuses_a_body_that_is_no_object(body: bytes) -> None:
    assert edited(body, FIELDS) is None


def is_json(body: bytes) -> bool:
    """Whether Python's decoder reads it."""
    try:
        json.loads(body)
    except ValueError:
        return False
    return True


@given(st.text('"\\{}[]:, a1', max_size=6))
def test_edited_turns_no_invalid_json_into_valid_json(inside: str) -> None:
    body = b"{%b}" % inside.encode()
    change = edited(body, FIELDS)
    assert change is not None
    assert is_json(bytes(change.body)) is is_json(body)


def test_may_split_is_true_where_engines_read_the_fields() -> None:
    assert may_split("sglang", "/generate", b"{}")
    assert not may_split("offloading", "/generate", b"{}")
    assert not may_split("sglang", CHAT, None)
    assert not may_split("sglang", CHAT, b" " * (MAX_EDITED_BYTES + 1))
    assert not may_split("sglang", "/v1/embeddings", b"{}")


def test_pulled_body_replaces_the_source_that_the_client_names() -> None:
    own = b'{"model": "m", "kv_transfer_params": {"remote_kv_source": {"remote_host": "evil"}}}'
    made = edited(own, pulled("[fd00::1]:8000", 5710, 10))
    assert made is not None
    place = {"kv_request_id": f"{10:016x}", "remote_host": "fd00::1", "remote_port": 5710}
    assert json.loads(bytes(made.body)) == {
        "model": "m",
        "kv_transfer_params": {"remote_kv_source": place},
    }
    assert made.tail == ""
