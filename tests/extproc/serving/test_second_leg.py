import json

from msgspec.structs import replace

from extproc.config.schema import Config, Model
from extproc.config.sections import Disaggregation
from extproc.picking.decision import Refusal, Source, Split
from extproc.requests.request import Ask, Head
from extproc.serving.second_leg import Legs
from tests.extproc.admin.decisions import decided


def test_a_sidecar_is_told_whom_to_pull_from_and_no_client_may_tell_it() -> None:
    rules = Disaggregation("header", "offloading", min_pulled_tokens=64)
    legs = Legs(Config(models=(Model("m"),), disaggregation=rules))
    ask = Ask(Head("POST", "/v1/chat/completions", None), b"{}")
    made = replace(decided(), source=Source("b:1", 5710, 64))
    assert legs.of(made, ask) == ((("x-kv-cache-source-host-port", "b:1"),), None)
    assert legs.of(decided(), ask) == ((), None)
    assert {"x-kv-cache-source-host-port", "x-encoder-hosts-ports"} < set(legs.headers)


def test_a_sidecar_is_told_who_computes_the_prompt() -> None:
    legs = Legs(Config(models=(Model("m"),), disaggregation=Disaggregation("header")))
    ask = Ask(Head("POST", "/v1/chat/completions", None), b"{}")
    made = replace(decided(), split=Split(decided(names=["p:1"]), "it holds more"))
    assert legs.of(made, ask) == ((("x-prefiller-host-port", "p:1"),), None)


def test_a_body_names_whom_to_pull_from_where_there_is_no_sidecar() -> None:
    rules = Disaggregation(None, "offloading", min_pulled_tokens=64)
    legs = Legs(Config(models=(Model("m"),), disaggregation=rules))
    ask = Ask(Head("POST", "/v1/chat/completions", None), b'{"model": "m"}')
    said = legs.of(replace(decided(), source=Source("b:1", 5710, 64)), ask)
    assert not isinstance(said, Refusal)
    assert said[1] is not None
    named = json.loads(said[1])["kv_transfer_params"]["remote_kv_source"]
    assert "5710" in json.dumps(named)
