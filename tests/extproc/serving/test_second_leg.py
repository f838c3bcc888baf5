from msgspec.structs import replace

from extproc.config.schema import Config, Model
from extproc.config.sections import Disaggregation
from extproc.picking.decision import Source, Split
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
