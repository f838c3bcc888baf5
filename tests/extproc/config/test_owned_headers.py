from typing import Any

import pytest

from extproc.config.owned_headers import (
    DIFFERING,
    OWNED,
    RESERVED,
    owned_headers,
    rank_name,
    removed_early,
)
from extproc.config.schema import Config, Model, Policy
from extproc.config.sections import Classes, ClassSettings, Disaggregation, Isolation

PLAIN = Config()
SIDECARS = {"x-prefiller-host-port", "x-kv-cache-source-host-port", "x-encoder-hosts-ports"}
SECOND_REQUEST = {
    "x-prefiller-host-port",
    "x-kvsteer-prefill-cluster",
    "x-kvsteer-prefill-tail",
}
TENANTS = Isolation("x-tenant", "secret")
CLASSES = Classes("x-class", "one", (ClassSettings("one"), ClassSettings("two", 10)))


@pytest.mark.parametrize(
    ("sections", "added"),
    [
        ({}, set()),
        ({"disaggregation": Disaggregation("header")}, SIDECARS),
        ({"disaggregation": Disaggregation("mirror")}, SECOND_REQUEST),
        ({"isolation": TENANTS}, SIDECARS),
        (
            {"isolation": TENANTS, "disaggregation": Disaggregation("mirror")},
            SIDECARS | SECOND_REQUEST,
        ),
        ({"policy": Policy(classes=CLASSES)}, {"x-vllm-priority"}),
        ({"policy": Policy(warm_models=("m",))}, {"x-kvsteer-warm"}),
    ],
)
def test_headers_of_a_feature_are_owned_and_removed_early_where_it_is_on(
    sections: dict[str, Any], added: set[str]
) -> None:
    config = Config(**sections)
    assert {*owned_headers(config)} - {*owned_headers(PLAIN)} == added
    assert {*removed_early(config)} - {*removed_early(PLAIN)} == added


def test_pick_and_model_are_removed_early_everywhere_and_the_model_owned_with_several() -> None:
    several = Config(models=(Model("m"), Model("n")))
    assert {*removed_early(PLAIN)} == {*removed_early(several)} == RESERVED
    assert {"x-gateway-destination-endpoint", "x-kvsteer-model"} <= RESERVED
    assert owned_headers(PLAIN)[0] == "x-gateway-destination-endpoint"
    assert {*owned_headers(several)} - {*owned_headers(PLAIN)} == {"x-kvsteer-model"}


def test_header_of_ranks_is_owned_under_its_configured_name_once() -> None:
    named = [Config(policy=Policy(rank_header=one)) for one in ("auto", "X-Rank", None)]
    assert [{*owned_headers(one)} - {*owned_headers(named[-1])} for one in named] == [
        {"x-data-parallel-rank"},
        {"x-rank"},
        set(),
    ]
    twice = Config(policy=Policy(rank_header="X-vLLM-priority", classes=CLASSES))
    assert owned_headers(twice).count("x-vllm-priority") == 1


def test_rank_name_is_the_engines_header_or_the_configured_one() -> None:
    assert [rank_name(name) for name in ("auto", "X-Rank", None)] == [
        "x-data-parallel-rank",
        "x-rank",
        None,
    ]


def test_names_are_in_lower_case_and_each_has_one_row() -> None:
    names = [one.name for one in OWNED]
    assert names == [*dict.fromkeys(name.lower() for name in names)]
    assert set(names) >= DIFFERING
