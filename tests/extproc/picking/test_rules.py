from extproc.config import schema
from extproc.config.schema import Policy
from extproc.picking.load import PREFILL_TOKENS_PER_SECOND
from extproc.picking.policies import POLICIES, endpoints_named, policy_of
from extproc.picking.sent import Lifetimes


def test_the_defaults_are_the_same_on_both_sides() -> None:
    assert Policy().cost.prefill_tokens_per_second == PREFILL_TOKENS_PER_SECOND
    assert Policy().speculative_ms == Lifetimes().speculative * 1000
    assert Policy().approximate_ms == Lifetimes().approximate * 1000
    assert tuple(POLICIES) == schema.POLICIES


def test_a_list_is_named_in_the_endpoint_picker_protocol_only_where_that_is_configured() -> None:
    told = [
        [
            endpoints_named(Policy(endpoints=count), is_duplex=is_duplex)
            for is_duplex in (False, True)
        ]
        for count in (None, 1, 8)
    ]
    assert told == [[3, 1], [1, 1], [8, 8]]


def test_a_model_may_have_a_policy_of_its_own() -> None:
    models = (schema.Model("a", policy="random"), schema.Model("b"))
    one = schema.Config(models=models)
    assert [policy_of(one, name, None) for name in ("a", "b", None)] == ["random", "cost", "cost"]


def test_a_request_may_name_a_policy_only_if_a_header_is_configured() -> None:
    models = (schema.Model("a", policy="random"),)
    closed = schema.Config(models=models)
    opened = schema.Config(models=models, policy=Policy(header="x-policy"))
    assert policy_of(closed, "a", "round_robin") == "random"
    assert policy_of(opened, "a", "round_robin") == "round_robin"
    assert policy_of(opened, "a", "no such") == "random"
