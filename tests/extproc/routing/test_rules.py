from extproc.config import schema
from extproc.config.schema import Policy
from extproc.routing.claims.claim_table import Lifetimes
from extproc.routing.load.loads import PREFILL_TOKENS_PER_SECOND
from extproc.routing.policy_choice import endpoints_named, policy_of


def test_policy_defaults_equal_those_of_the_modules() -> None:
    assert Policy().cost.prefill_tokens_per_second == PREFILL_TOKENS_PER_SECOND
    assert Policy().speculative_ms == Lifetimes().speculative * 1000
    assert Policy().approximate_ms == Lifetimes().approximate * 1000


def test_endpoints_named_lists_several_only_where_configured() -> None:
    told = [
        [
            endpoints_named(Policy(endpoints=count), is_duplex=is_duplex)
            for is_duplex in (False, True)
        ]
        for count in (None, 1, 8)
    ]
    assert told == [[3, 1], [1, 1], [8, 8]]


def test_policy_of_a_model_overrides_the_general_one() -> None:
    models = (schema.Model("a", policy="random"), schema.Model("b"))
    one = schema.Config(models=models)
    assert [policy_of(one, name, None) for name in ("a", "b", None)] == ["random", "cost", "cost"]


def test_policy_header_of_a_request_counts_only_where_configured() -> None:
    models = (schema.Model("a", policy="random"),)
    closed = schema.Config(models=models)
    opened = schema.Config(models=models, policy=Policy(header="x-policy"))
    assert policy_of(closed, "a", "round_robin") == "random"
    assert policy_of(opened, "a", "round_robin") == "round_robin"
    assert policy_of(opened, "a", "no such") == "random"
