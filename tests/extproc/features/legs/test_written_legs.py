"""What tells the proxy and the engines of a request's legs."""

import json
from array import array

import msgspec

from extproc.config.schema import Config, Model
from extproc.config.sections import Disaggregation
from extproc.features.feature import NOTHING_WRITTEN, Written
from extproc.features.legs.legs import Legs
from extproc.proof.samples import HANDED
from extproc.requests.refusals import refused_body
from extproc.requests.request import CHAT_PATH as CHAT
from extproc.routing.decision import Decision, PullSource, Split
from extproc.routing.handing import Handing
from tests.extproc.admin.decisions import decided as placed


def test_source_header_is_set_by_the_router() -> None:
    rules = Disaggregation("header", "offloading", min_pulled_tokens=64)
    legs = Legs(Config(models=(Model("m"),), disaggregation=rules))
    made = msgspec.structs.replace(placed(), source=PullSource("b:1", 5710, 64))
    assert legs.write(made, CHAT, b"{}") == Written((("x-kv-cache-source-host-port", "b:1"),))
    assert legs.write(placed(), CHAT, b"{}") == NOTHING_WRITTEN


def test_prefill_header_names_the_prefill_worker_to_a_sidecar() -> None:
    legs = Legs(Config(models=(Model("m"),), disaggregation=Disaggregation("header")))
    made = msgspec.structs.replace(placed(), split=Split(placed(names=["p:1"]), "it holds more"))
    assert legs.write(made, CHAT, b"{}") == Written((("x-prefiller-host-port", "p:1"),))


def test_pulled_body_names_its_source_where_no_sidecar_runs() -> None:
    rules = Disaggregation(None, "offloading", min_pulled_tokens=64)
    legs = Legs(Config(models=(Model("m"),), disaggregation=rules))
    said = legs.write(
        msgspec.structs.replace(placed(), source=PullSource("b:1", 5710, 64)),
        CHAT,
        b'{"model": "m"}',
    )
    assert isinstance(said, Written)
    assert said.body is not None
    named = json.loads(bytes(said.body))["kv_transfer_params"]["remote_kv_source"]
    assert "5710" in json.dumps(named)


def mirroring() -> tuple[Legs, Decision]:
    """The legs of a configuration in which Envoy sends the second request, and a split decision."""
    rules = Disaggregation("mirror", "sglang")
    apart = msgspec.structs.replace(placed(), split=Split(placed(names=["p:1"]), "it holds more"))
    return Legs(Config(models=(Model("m"),), disaggregation=rules), bits=lambda _: 7), apart


def test_mirroring_names_the_prefill_endpoint_and_one_room_in_both_bodies() -> None:
    legs, apart = mirroring()
    said = legs.write(apart, CHAT, b"{}")
    assert isinstance(said, Written)
    assert said.headers == (
        ("x-prefiller-host-port", "p:1"),
        ("x-kvsteer-prefill-cluster", "prefill"),
    )
    assert said.body is not None
    assert json.loads(bytes(said.body))["bootstrap_room"] == 7
    assert legs.write(placed(), CHAT, b"{}") == NOTHING_WRITTEN


def test_mirroring_sets_no_header_for_a_body_that_stays_unchanged() -> None:
    legs, apart = mirroring()
    assert legs.write(apart, CHAT, None) == NOTHING_WRITTEN


def test_mirroring_refuses_an_unchangeable_body_only_where_two_legs_are_needed() -> None:
    legs, apart = mirroring()
    assert legs.write(placed(), CHAT, b"[]") == NOTHING_WRITTEN
    assert legs.write(apart, CHAT, b"[]") == refused_body(CHAT)


def test_both_legs_get_the_ids_of_the_prompt_beside_the_connectors_own_fields() -> None:
    rules = Disaggregation("mirror", "offloading")
    legs = Legs(Config(models=(Model("m"),), disaggregation=rules), bits=lambda _: 7)
    ids = Handing(HANDED, array("I", range(1000, 1500)))
    split = Split(placed(names=["p:1"]), "it holds more")
    said = legs.write(msgspec.structs.replace(placed(), split=split, handing=ids), CHAT, b"{}")
    assert isinstance(said, Written)
    body, tail = bytes(said.body or b"").decode(), dict(said.headers)["x-kvsteer-prefill-tail"]
    cut, _, end = tail.partition(":")
    assert len(tail) < 300
    both = [json.loads(one) for one in (body, body[: -int(cut)] + end)]
    params = [one["kv_transfer_params"] for one in both]
    assert [one["prompt_token_ids"] for one in params] == [[*range(1000, 1500)]] * 2
    assert ["remote_prefiller" in one for one in params] == [True, False]
    assert ["remote_decoder" in one for one in params] == [False, True]


def test_body_that_pulls_gets_the_ids_beside_its_source() -> None:
    rules = Disaggregation(None, "offloading", min_pulled_tokens=64)
    legs = Legs(Config(models=(Model("m"),), disaggregation=rules))
    ids = Handing(HANDED, array("I", [1, 2]))
    made = msgspec.structs.replace(placed(), source=PullSource("b:1", 5710, 64), handing=ids)
    said = legs.write(made, CHAT, b"{}")
    assert isinstance(said, Written)
    params = json.loads(bytes(said.body or b""))["kv_transfer_params"]
    assert (params["prompt_token_ids"], "remote_kv_source" in params) == ([1, 2], True)
