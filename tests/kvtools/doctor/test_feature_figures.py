"""What the doctor says of features about which a running router has seen something, or nothing."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.schema import Config, Policy
from extproc.config.sections import (
    Classes,
    ClassSettings,
    Disaggregation,
    Isolation,
    StoreSettings,
)
from kvtools.doctor.feature_figures import figures_in, judge_figures

PRICED = Disaggregation(connector="offloading", min_pulled_tokens=1_000, price_pulls=True)
ON = Config(
    isolation=Isolation("x-tenant", "f"),
    policy=Policy(classes=Classes("x-class", "a", (ClassSettings("a"), ClassSettings("b", 1)))),
    disaggregation=PRICED,
    stores=(StoreSettings("s"),),
)


def isolated(outcome: str, count: int) -> str:
    return f'kvsteer_isolated_requests_total{{outcome="{outcome}"}} {count}.0'


def of_class(name: str, count: int) -> str:
    return f'kvsteer_class_requests_total{{class="{name}",verdict="steer"}} {count}.0'


def stored(count: int) -> str:
    return f'kvsteer_store_blocks{{store="s"}} {count}.0'


def worker(store: str | None = "s", **shown: Any) -> dict[str, Any]:
    return {"name": "w", "store": store, "feeds": [{"blocks": 7}], "in_flight": 0, **shown}


def transfers(sent: int, measured: int) -> dict[str, Any]:
    return worker(transfers={"sent_tokens": sent, "measured": measured, "queued_tokens": 0})


def loaded(tokens: int) -> dict[str, Any]:
    share = {"share": 0.5, "offered_tokens": 200_000, "loaded_tokens": tokens}
    return worker(store_share=share)


@pytest.mark.parametrize(
    ("samples", "workers", "said"),
    [
        ([], [], []),
        ([isolated("no_tenant", 20)], [], ["isolation-header none of 20 requests"]),
        ([isolated("common", 19)], [], []),
        ([isolated("no_tenant", 30), isolated("salted", 1)], [], [" 1 requests named their"]),
        ([isolated("several_tenants", 2)], [], [" 2 requests named two tenants"]),
        ([of_class("a", 20)], [], [" all 20 requests were of a"]),
        ([of_class("a", 20), of_class("b", 1)], [], [" requests of 2 classes"]),
        ([of_class("a", 19)], [], []),
        ([], [transfers(50_000, 0)], ["pull-unseen workers were to pull 50000 tokens"]),
        ([], [transfers(50_000, 0), transfers(0, 3)], [" 3 transfers"]),
        ([], [transfers(49_999, 0)], []),
        ([stored(5)], [worker()], [" s is known to have 5 blocks"]),
        ([stored(0)], [worker()], ["store-silent no block of s is known, though its workers"]),
        ([stored(0)], [worker(None)], ["store-silent no block of s is known, and no worker"]),
        ([stored(0)], [worker(feeds=[])], []),
        ([], [loaded(0)], ["store-unread w loaded 0 of the 200000"]),
        ([], [loaded(9)], [" w loaded 9"]),
    ],
)
def test_feature_of_which_nothing_comes_is_found(
    samples: list[str], workers: list[dict[str, Any]], said: list[str]
) -> None:
    figures = figures_in(json.dumps(workers).encode(), "\n".join(samples).encode())
    found = [f"{one.code} {one.says}" for one in judge_figures(ON, figures)]
    assert len(found) == len(said), found
    assert all(words in one for words, one in zip(said, found, strict=True))


def test_nothing_is_said_of_features_that_are_off() -> None:
    samples = "\n".join([isolated("no_tenant", 99), of_class("a", 99), stored(0)])
    figures = figures_in(json.dumps([transfers(10**9, 0)]).encode(), samples.encode())
    assert not list(judge_figures(Config(), figures))


@given(st.binary(), st.binary())
def test_any_answer_is_read(workers: bytes, metrics: bytes) -> None:
    assert not list(judge_figures(ON, figures_in(workers, metrics)))
