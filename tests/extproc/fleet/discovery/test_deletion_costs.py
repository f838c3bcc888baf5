"""The pods whose caches saved the fewest tokens are deleted first."""

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.schema import Kubernetes
from extproc.fleet.discovery.deletion_costs import (
    ANNOTATION,
    LEAST_CHANGE,
    DeletionCosts,
    cost_of,
    due_costs,
)
from tests.extproc.fleet.discovery.api_server import NAMESPACE, ApiServer, api_server
from tests.waiting import until


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[ApiServer, str]]:
    async with api_server(tmp_path) as one:
        yield one


def costs_of(server: ApiServer) -> dict[str, str]:
    return {
        name: annotations[ANNOTATION]
        for name, annotations in server.annotated.items()
        if ANNOTATION in annotations
    }


@given(st.integers(0, 2**62), st.integers(0, 2**62))
def test_cost_grows_with_the_tokens_and_fits_32_bits(one: int, other: int) -> None:
    assert (cost_of(one) - cost_of(other)) * (one - other) >= 0
    assert 0 <= cost_of(one) < 2**31


@given(st.dictionaries(st.sampled_from("abc"), st.integers(0, 10**9)))
def test_due_costs_are_those_that_changed_much(tokens: dict[str, int]) -> None:
    told = {"a": 100, "b": 200}
    due = due_costs(tokens.items(), told)
    for pod, count in tokens.items():
        cost = cost_of(count)
        assert (pod in due) is (pod not in told or abs(cost - told[pod]) >= LEAST_CHANGE)
        assert due.get(pod, cost) == cost


def test_due_cost_of_a_pod_is_that_of_all_its_workers() -> None:
    assert due_costs([("a", 500), ("a", 524)], {}) == {"a": cost_of(1_024)}


async def test_costs_are_written_once_until_they_change(server: tuple[ApiServer, str]) -> None:
    api, kubeconfig = server
    saved = {"a": 1_000, "b": 1_000_000}
    options = Kubernetes(namespace=NAMESPACE, selector="app=vllm", kubeconfig=kubeconfig)
    one = DeletionCosts(options, lambda: list(saved.items()))
    await one.write()
    assert costs_of(api) == {"a": "100", "b": "199"}
    api.annotated.clear()
    saved["b"] = 100
    await one.write()
    assert costs_of(api) == {"b": "67"}
    api.annotated.clear()
    saved["b"] = 101
    await one.write()
    assert costs_of(api) == {}


async def test_refusal_is_logged_once_and_ends_nothing(
    server: tuple[ApiServer, str], caplog: pytest.LogCaptureFixture
) -> None:
    api, kubeconfig = server
    api.refuses = 403
    options = Kubernetes(namespace=NAMESPACE, selector="app=vllm", kubeconfig=kubeconfig)
    costs = DeletionCosts(options, lambda: [("a", 7)], interval_seconds=0.01)
    with caplog.at_level(logging.WARNING):
        task = asyncio.create_task(costs.run())
        await until(lambda: len(api.asked) > 2, "it tries again")
        api.refuses = None
        await until(lambda: costs_of(api), "the cost is written at last")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert sum("deletion costs" in one.getMessage() for one in caplog.records) == 1
