import json
from array import array
from collections.abc import Mapping
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.schema import Config, Model, Policy
from extproc.config.sections import Disaggregation
from extproc.picking.decision import (
    Decision,
    Query,
    Refusal,
    Snapshot,
    Source,
    Split,
    Verdict,
    decide,
)
from extproc.picking.disaggregation import (
    COMPUTES_FOR_OTHERS,
    MAX_EDITED_BYTES,
    WORDS,
    Legs,
    Transfer,
    decide_legs,
    edited,
    may_hide,
    may_split,
    pulled,
    transfer,
    with_source,
)
from extproc.picking.eligibility import Candidate, Demand
from extproc.picking.explain import explanation, why
from extproc.picking.load import Load
from kvstate.overlap import Overlap, Prompt
from tests.extproc.admin.decisions import decided as placed

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
    **more: Any,
) -> Decision:
    """Decides; held: the number of blocks of 16 tokens, by worker."""
    known = loads or {}
    overlaps = {name: Overlap(16, (blocks, 0, 0, 0)) for name, blocks in (held or {}).items()}
    snapshot = Snapshot(
        workers=[Candidate(name, f"{name}:1", role=ROLES[name]) for name in workers],
        held=[overlaps for _ in query.prompts],
        load=lambda endpoint, _: known.get(endpoint[0], Load()),
        policy="cost",
        turn=0,
        rules=policy_rules,
        **more,
    )
    return decide_legs(query, snapshot, rules, 0.0, Random(0))


def legs(made: Decision) -> tuple[str, str]:
    """Returns the worker that answers and the one that computes for it, "" if none does."""
    prefill = made.prefill
    return made.worker, "" if prefill is None else prefill.worker


def outcome_of(made: Decision) -> str:
    assert made.split is not None
    return made.split.outcome


def test_a_decode_worker_that_answers_others_leaves_a_long_prompt_to_a_prefill_worker() -> None:
    made = decided(loads={"d": BUSY})
    assert legs(made) in {("d", "p"), ("d", "q")}
    assert made.pick == ("d:1",)


def test_an_idle_decode_worker_computes_the_prompt_itself() -> None:
    assert legs(decided()) == ("d", "")


def test_a_queue_on_the_prefill_workers_keeps_the_prompt_where_it_is_answered() -> None:
    queued = Load(1, 100_000.0)
    assert legs(decided(loads={"d": BUSY, "p": queued, "q": queued})) == ("d", "")
    assert legs(decided(loads={"d": BUSY, "p": queued})) == ("d", "q")


def test_a_prefill_worker_is_picked_by_what_it_holds() -> None:
    for name in "pq":
        assert legs(decided(loads={"d": BUSY}, held={name: 200})) == ("d", name)


def test_what_the_decode_worker_holds_need_not_be_computed_elsewhere() -> None:
    made = decided(loads={"d": BUSY}, held={"d": 243})
    assert legs(made) == ("d", "")
    assert made.split is not None
    assert "fewer than 128" in made.split.why


def test_a_slow_transfer_is_not_worth_it() -> None:
    rules = Disaggregation("header", transfer_tokens_per_second=1_000)
    assert legs(decided(loads={"d": Load(4)}, rules=rules)) == ("d", "")
    assert legs(decided(loads={"d": Load(4)}))[1] != ""


def test_a_fleet_that_is_slower_than_configured_splits_as_one_that_is_not() -> None:
    for slowness in (0.5, 1.0, 3.0):
        loads = {name: Load(4 * (name == "d"), slowness=slowness) for name in "dpq"}
        assert legs(decided(loads=loads))[1] != ""
        made = decided(loads=loads | {"d": Load(0, slowness=slowness)})
        assert legs(made) == ("d", "")
    slow = {"d": Load(1, slowness=4.0)}
    assert outcome_of(decided(loads=slow)) == "apart"


def test_a_prompt_on_a_slow_decode_worker_costs_as_much_as_it_takes_there() -> None:
    made = decided(loads={"d": Load(1, slowness=4.0)})
    assert made.split is not None
    assert made.split.here == pytest.approx(4.0 * 4000 * 1.5)


def test_each_outcome_is_told_by_what_led_to_it() -> None:
    busy, whole = {"d": BUSY}, {"b": Load()} | {"d": BUSY}
    assert outcome_of(decided(loads=busy)) == "apart"
    assert outcome_of(decided("pd", rules=SGLANG)) == "needed"
    assert outcome_of(decided()) == "here"
    assert outcome_of(decided(loads=busy, held={"d": 243})) == "few_tokens"
    assert outcome_of(decided("pdb", loads=whole)) == "whole"
    assert outcome_of(decided("d")) == "no_prefill_worker"
    assert outcome_of(decided(rules=Disaggregation())) == "not_set"


def test_a_worker_of_both_roles_takes_whole_requests_only() -> None:
    made = decided("pqb", loads={"b": BUSY})
    assert legs(made) == ("b", "")
    assert legs(decided("pqdb", loads={"d": BUSY})) == ("b", "")


def test_prefill_workers_answer_nothing() -> None:
    made = decided("pq")
    assert (made.pick, made.verdict) == ((), Verdict.NO_OVERRIDE)
    assert set(made.excluded) == {COMPUTES_FOR_OTHERS}


@pytest.mark.parametrize(
    ("query", "outcome"),
    [
        (msgspec.structs.replace(QUERY, may_split=False), "body"),
        (msgspec.structs.replace(QUERY, answers=2), "several_answers"),
        (msgspec.structs.replace(QUERY, prompts=list(QUERY.prompts) * 2), "several_prompts"),
        (Query("m"), "no_prompt"),
    ],
)
def test_some_requests_have_one_leg(query: Query, outcome: str) -> None:
    made = decided(loads={"d": BUSY}, query=query)
    assert legs(made) == ("d", "")
    assert made.split is not None
    assert (made.split.outcome, made.split.why) == (outcome, WORDS[outcome])


def test_without_a_mode_nothing_is_split() -> None:
    assert legs(decided(loads={"d": BUSY}, rules=Disaggregation())) == ("d", "")


def test_prefill_workers_that_cannot_take_it_are_left_out() -> None:
    busy = {"d": BUSY}
    assert legs(decided(loads=busy, ejected={"p:1": "dead"})) == ("d", "q")
    assert legs(decided(loads=busy, unfit={"q:1": "draining"})) == ("d", "p")
    assert legs(decided(loads=busy, unfit={"q:1": "draining"}, ejected={"p:1": "x"})) == ("d", "")
    subset = msgspec.structs.replace(QUERY, demand=Demand(subset=frozenset({"d:1", "q:1"})))
    assert legs(decided(loads=busy, query=subset)) == ("d", "q")


def test_a_prefill_worker_in_doubt_is_used_only_where_all_are() -> None:
    busy = {"d": BUSY}
    assert legs(decided(loads=busy, held={"p": 200}, doubted=["p:1"])) == ("d", "q")
    assert legs(decided(loads=busy, held={"p": 200}, doubted=["p:1", "q:1"])) == ("d", "p")
    assert legs(decided("pd", loads=busy, doubted=["p:1", "d:1"])) == ("d", "p")


def test_a_retry_of_two_legs_finds_decode_workers_only() -> None:
    made = decided("pdeb", loads={"d": BUSY, "e": BUSY, "b": Load(9, 50_000.0)})
    assert legs(made)[1] == "p"
    assert set(made.pick) == {"d:1", "e:1"}


def test_sglang_never_computes_on_a_decode_worker() -> None:
    assert legs(decided("pd", rules=SGLANG)) == ("d", "p")
    assert legs(decided("pd", rules=SGLANG, held={"d": 249})) == ("d", "p")
    made = decided("pdb", rules=SGLANG, ejected={"p:1": "dead"})
    assert (legs(made), made.pick) == (("b", ""), ("b:1",))
    assert "cannot compute" in made.excluded[1]


def test_sglang_retries_a_whole_request_on_workers_of_both_roles_only() -> None:
    made = decided("pdb", rules=SGLANG, loads={"d": BUSY})
    assert (legs(made), made.pick) == (("b", ""), ("b:1",))


def test_sglang_takes_a_batch_of_prompts_and_what_has_no_prompt() -> None:
    batch = msgspec.structs.replace(QUERY, prompts=list(QUERY.prompts) * 2)
    assert legs(decided("pd", rules=SGLANG, query=batch)) == ("d", "p")
    assert legs(decided("pd", rules=SGLANG, query=Query("m"))) == ("d", "")


def test_sglang_without_a_prefill_worker_is_left_to_the_proxy() -> None:
    made = decided("d", rules=SGLANG)
    assert (made.pick, made.verdict) == ((), Verdict.NO_OVERRIDE)


def test_every_prefill_worker_over_its_limit_is_used_all_the_same() -> None:
    full = {"p": Load(9), "q": Load(9), "d": Load(1)}
    policy = Policy(max_in_flight=4, shed=True)
    assert legs(decided(loads=full, rules=SGLANG, policy_rules=policy))[1] in {"p", "q"}


def test_an_explanation_shows_both_legs_and_why() -> None:
    made = decided(loads={"d": BUSY})
    shown = explanation(made, lambda _: "live")["prefill"]
    assert shown["pick"] in {"p:1", "q:1"}
    assert shown["cost"]["here"] > shown["cost"]["apart"] > 0
    assert [one["endpoint"] for one in shown["candidates"]] == ["p:1", "q:1"]
    assert "computes the prompt: computing the prompt elsewhere costs less" in why(made)
    whole = explanation(decided(), lambda _: "live")["prefill"]
    assert (whole["pick"], "candidates" in whole) == (None, False)
    assert "it computes the prompt" in why(decided())


def pulling(
    held: Mapping[str, int], query: Query = QUERY, ejected: tuple[str, ...] = (), ports: str = "abc"
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
    made = decide(query, snapshot, 0.0, Random(0))
    return with_source(query, made, 512, ejected)


def idle(*_: object) -> Load:
    return Load()


def test_who_holds_enough_more_than_the_pick_is_named_to_pull_from() -> None:
    made = pulling({"a": 10, "b": 100, "c": 200})
    assert made.source == ("c:1", 5710, 190 * 16)
    assert made.pick == ("a:1", "b:1")
    assert made.uncached_tokens == 4000 - 200 * 16
    assert explanation(made, lambda _: "live")["source"]["endpoint"] == "c:1"
    assert "it pulls 3040 tokens from c:1" in why(made)


def test_nothing_is_pulled_where_it_is_not_worth_it_or_cannot_be() -> None:
    assert pulling({"a": 10, "b": 41}).source is None
    assert pulling({"a": 200, "b": 10}).source is None
    assert pulling({}).source is None
    assert pulling({"b": 100}, ports="ac").source is None
    assert pulling({"b": 100}, ports="bc").source is None
    assert pulling({"b": 100, "c": 90}, ejected=("b:1",)).source == ("c:1", 5710, 90 * 16)
    for query in (
        msgspec.structs.replace(QUERY, may_split=False),
        msgspec.structs.replace(QUERY, answers=2),
        msgspec.structs.replace(QUERY, reads_cache=False),
        Query("m"),
    ):
        assert pulling({"b": 100}, query).source is None


def test_a_request_of_two_legs_pulls_nothing_besides() -> None:
    made = decided(loads={"d": BUSY}, held={"p": 200})
    assert with_source(QUERY, made, 1, ()) is made
    nobody = decided("p")
    assert with_source(QUERY, nobody, 1, ()) is nobody


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = b'{ "model": "m",\n "messages": [{"role": "user", "content": "a\\u00e4"}], "n": 1 }\n'
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
NAMES = st.sampled_from(["bootstrap_room", "bootstrap_host", "kv_transfer_params", "model", "n"])


def members(part: bytes) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(b"{" + part + b"}")
    return read


def sent(body: bytes, fields: Transfer) -> tuple[dict[str, Any], dict[str, Any]]:
    """The bodies that both workers read: Envoy's filter makes the second from the first."""
    change = edited(body, fields)
    assert change is not None
    decode = json.loads(change.body)
    if not change.tail:
        return decode, decode
    cut, _, tail = change.tail.partition(":")
    return decode, json.loads(change.body[: len(change.body) - int(cut)] + tail.encode())


def test_both_of_sglangs_workers_read_the_same_room() -> None:
    fields = transfer("sglang", "10.0.0.1:8000", 8998, CHAT, [77])
    decode, prefill = sent(BODY, fields)
    assert decode == prefill == json.loads(BODY) | {
        "bootstrap_host": "10.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 77,
    }  # fmt: skip


def test_each_of_sglangs_prompts_has_a_room() -> None:
    fields = members(transfer("sglang", "[::1]:8000", 8998, COMPLETIONS, [7, 8]).decode)
    assert fields == {
        "bootstrap_host": ["::1", "::1"],
        "bootstrap_port": [8998, 8998],
        "bootstrap_room": [7, 8],
    }


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_vllms_prefill_worker_is_asked_for_one_token(path: str) -> None:
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


def test_mooncakes_workers_name_the_engine_and_its_bootstrap_server() -> None:
    fields = transfer("mooncake", "[::1]:8000", 8998, COMPLETIONS, [1])
    here = members(fields.decode)["kv_transfer_params"]
    there = members(fields.prefill)["kv_transfer_params"]
    assert here["remote_bootstrap_addr"] == "http://[::1]:8998"
    assert here["remote_engine_id"] == "[::1]:8000"
    assert (here["do_remote_prefill"], there["do_remote_decode"]) == (True, True)
    assert here["transfer_id"] == there["transfer_id"]


FIELDS = transfer("sglang", "10.0.0.1:8000", 8998, CHAT, [77])


@given(st.dictionaries(st.text(max_size=8), VALUES, max_size=5), st.sampled_from(["", " ", "\n\t"]))
def test_all_else_stays_as_it_is_byte_for_byte(members: dict[str, Any], space: str) -> None:
    body = (json.dumps(members) + space).encode()
    change = edited(body, FIELDS)
    assert change is not None
    before = body.rstrip()[:-1]
    assert change.body.startswith(before)
    assert change.body.removeprefix(before).lstrip(b",") == FIELDS.decode + b"}"


@given(st.lists(st.tuples(NAMES, VALUES), max_size=6), st.booleans())
def test_no_field_of_a_clients_is_left_whatever_is_written_twice(
    pairs: list[tuple[str, Any]],
    splits: bool,  # noqa: FBT001
) -> None:
    written = ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in pairs)
    change = edited(f"{{{written}}}".encode(), FIELDS if splits else None)
    assert change is not None
    ours = members(FIELDS.decode) if splits else {}
    kept = {name: value for name, value in pairs if name in ("model", "n")}
    assert json.loads(change.body) == kept | ours


def test_a_name_that_is_written_with_escapes_is_taken_out_too() -> None:
    change = edited(b'{"bootstrap\\u005froom": 7, "n": 1e400}', None)
    assert change is not None
    assert change.body == b'{"n":1e400}'


def test_a_body_without_fields_is_the_same_object() -> None:
    change = edited(BODY, None)
    assert change is not None
    assert change.body is BODY


@pytest.mark.parametrize("body", [b"", b"[]", b'{"a": NaN}', b"\xff", b"[" * 100_000, b"{}x"])
def test_what_is_no_object_is_not_changed(body: bytes) -> None:
    assert edited(body, FIELDS) is None


def test_what_pythons_json_would_read_may_hide_fields() -> None:
    assert may_hide(b'{"x": NaN, "kv_transfer_params": {}}')
    assert may_hide('{"bootstrap_room": 7}'.encode("utf-16"))
    assert may_hide(b'{"x": NaN, "bootstrap\\u005froom": 7}')
    assert not may_hide(b'{"model": "m", "messages": [')


def test_a_body_can_be_split_where_engines_read_the_fields() -> None:
    assert may_split("sglang", "/generate", b"{}")
    assert not may_split("offloading", "/generate", b"{}")
    assert not may_split("sglang", CHAT, None)
    assert not may_split("sglang", CHAT, b" " * (MAX_EDITED_BYTES + 1))
    assert not may_split("sglang", "/v1/embeddings", b"{}")


def test_a_body_names_whom_to_pull_from_in_the_place_of_whom_the_client_names() -> None:
    own = b'{"model": "m", "kv_transfer_params": {"remote_kv_source": {"remote_host": "evil"}}}'
    made = edited(own, pulled("[fd00::1]:8000", 5710, 10))
    assert made is not None
    place = {"kv_request_id": f"{10:016x}", "remote_host": "fd00::1", "remote_port": 5710}
    assert json.loads(made.body) == {
        "model": "m",
        "kv_transfer_params": {"remote_kv_source": place},
    }
    assert made.tail == ""


def test_a_sidecar_is_told_whom_to_pull_from_and_no_client_may_tell_it() -> None:
    rules = Disaggregation("header", "offloading", min_pulled_tokens=64)
    legs = Legs(Config(models=(Model("m"),), disaggregation=rules))
    made = msgspec.structs.replace(placed(), source=Source("b:1", 5710, 64))
    assert legs.of(made, CHAT, b"{}") == ((("x-kv-cache-source-host-port", "b:1"),), None)
    assert legs.of(placed(), CHAT, b"{}") == ((), None)
    assert {"x-kv-cache-source-host-port", "x-encoder-hosts-ports"} < set(legs.headers)


def test_a_sidecar_is_told_who_computes_the_prompt() -> None:
    legs = Legs(Config(models=(Model("m"),), disaggregation=Disaggregation("header")))
    made = msgspec.structs.replace(placed(), split=Split(placed(names=["p:1"]), "it holds more"))
    assert legs.of(made, CHAT, b"{}") == ((("x-prefiller-host-port", "p:1"),), None)


def test_a_body_names_whom_to_pull_from_where_there_is_no_sidecar() -> None:
    rules = Disaggregation(None, "offloading", min_pulled_tokens=64)
    legs = Legs(Config(models=(Model("m"),), disaggregation=rules))
    said = legs.of(
        msgspec.structs.replace(placed(), source=Source("b:1", 5710, 64)), CHAT, b'{"model": "m"}'
    )
    assert not isinstance(said, Refusal)
    assert said[1] is not None
    named = json.loads(said[1])["kv_transfer_params"]["remote_kv_source"]
    assert "5710" in json.dumps(named)


def mirroring() -> tuple[Legs, Decision]:
    """The legs of a configuration in which Envoy sends the second request, and a split decision."""
    rules = Disaggregation("mirror", "sglang")
    apart = msgspec.structs.replace(placed(), split=Split(placed(names=["p:1"]), "it holds more"))
    return Legs(Config(models=(Model("m"),), disaggregation=rules), bits=lambda _: 7), apart


def test_envoy_is_told_where_the_second_request_goes_and_both_bodies_of_one_room() -> None:
    legs, apart = mirroring()
    said = legs.of(apart, CHAT, b"{}")
    assert not isinstance(said, Refusal)
    assert said[0] == (
        ("x-prefiller-host-port", "p:1"),
        ("x-kvsteer-prefill-cluster", "prefill"),
    )
    assert said[1] is not None
    assert json.loads(said[1])["bootstrap_room"] == 7
    assert legs.of(placed(), CHAT, b"{}") == ((), None)


def test_a_body_that_is_not_to_be_changed_says_nothing() -> None:
    legs, apart = mirroring()
    assert legs.of(apart, CHAT, None) == ((), None)


def test_a_body_that_cannot_be_changed_goes_to_one_worker_unless_it_may_hide_fields() -> None:
    legs, apart = mirroring()
    assert legs.of(placed(), CHAT, b"[]") == ((), None)
    hiding = b'{"bootstrap_host": "evil", "a": NaN}'
    assert isinstance(legs.of(placed(), CHAT, hiding), Refusal)
    assert isinstance(legs.of(apart, CHAT, b"[]"), Refusal)
