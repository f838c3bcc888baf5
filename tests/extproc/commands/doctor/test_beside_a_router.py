"""The doctor next to a running router and Envoy."""

from typing import Any

import aiohttp
import pytest

from extproc.commands.doctor.doctor import examine
from extproc.commands.doctor.findings import Severity
from extproc.config.reader import load
from tests.extproc.commands.doctor.fleet import SECONDS
from tests.system.system import System, running

pytestmark = pytest.mark.slow


async def feeds_of(system: System) -> list[dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{system.admin}/workers") as response,
    ):
        workers = await response.json()
    return [feed for worker in workers for feed in worker["feeds"]]


async def test_doctor_finds_a_working_system_right_and_leaves_it_so() -> None:
    async with running(workers=2) as system:
        config = load(str(system.config_file))
        for probes in (False, True):
            found = await examine(config, SECONDS, probes=probes)
            assert not [one for one in found if one.verdict is Severity.WRONG]
        assert {one.verdict for one in found if one.check == "envoy"} == {Severity.RIGHT}
        feeds = await feeds_of(system)
        assert {feed["state"] for feed in feeds} == {"live"}
        assert {(feed["gaps"], feed["restarts"]) for feed in feeds} == {(0, 0)}
