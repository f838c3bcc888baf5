"""Whether the doctor finds out that deletion costs of pods cannot be written."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from extproc.config.reader import parse
from extproc.config.schema import Config
from kvtools.doctor.deletion_cost_visit import visit
from kvtools.doctor.findings import Severity
from tests.extproc.fleet.discovery.api_server import NAMESPACE, ApiServer, api_server


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[ApiServer, str]]:
    async with api_server(tmp_path) as one:
        yield one


def config(kubeconfig: str, wanted: str = "true") -> Config:
    options = f"selector: app=vllm, namespace: {NAMESPACE}, kubeconfig: {kubeconfig}"
    kubernetes = f"{{{options}, deletion_cost: {wanted}}}"
    return parse(f"models: [{{name: a}}]\ndiscovery: {{kubernetes: {kubernetes}}}", "c")


@pytest.mark.parametrize(
    ("allows", "refuses", "verdict", "code"),
    [
        (True, None, Severity.RIGHT, ""),
        (False, None, Severity.WRONG, "deletion-cost-forbidden"),
        (True, 500, Severity.NOTE, ""),
    ],
)
async def test_permission_to_patch_pods_is_asked_for(
    server: tuple[ApiServer, str], allows: bool, refuses: int | None, verdict: Severity, code: str
) -> None:
    api, kubeconfig = server
    api.allows_patches, api.refuses = allows, refuses
    (finding,) = await visit(config(kubeconfig), 5.0)
    assert (finding.verdict, finding.code) == (verdict, code)


async def test_nothing_is_asked_if_no_costs_are_wanted(server: tuple[ApiServer, str]) -> None:
    api, kubeconfig = server
    assert await visit(config(kubeconfig, "false"), 5.0) == []
    assert not api.asked
