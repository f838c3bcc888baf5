"""The doctor next to a running router and Envoy."""

import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from extproc.config.reader import load
from kvtools.doctor.doctor import examine
from kvtools.doctor.feature_figures import LEAST_REQUESTS
from kvtools.doctor.findings import STEERING, Finding, Severity
from tests.kvtools.doctor.fleet import BRIEF, SECONDS
from tests.system.system import System, chat, long_text, running


async def feeds_of(system: System) -> list[dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{system.admin}/workers") as response,
    ):
        workers = await response.json()
    return [feed for worker in workers for feed in worker["feeds"]]


@pytest.mark.slow
async def test_doctor_finds_a_working_system_right_and_leaves_it_so() -> None:
    async with running(workers=2) as system:
        config = load(str(system.config_file))
        for probes in (False, True):
            found = await examine(config, SECONDS, probes=probes, bounds=BRIEF)
            assert not [one for one in found if one.verdict is Severity.WRONG]
        assert {one.verdict for one in found if one.check == "envoy"} == {Severity.RIGHT}
        feeds = await feeds_of(system)
        assert {feed["state"] for feed in feeds} == {"live"}
        assert {(feed["gaps"], feed["restarts"]) for feed in feeds} == {(0, 0)}


async def set_steering(system: System, percent: int) -> None:
    url = f"{system.admin}/steering"
    async with system.session.post(url, json={"percent": percent}) as response:
        assert response.status == 200


async def steering_of(system: System) -> Finding:
    """What a doctor finds about steering."""
    found = await examine(load(str(system.config_file)), SECONDS, probes=False, bounds=BRIEF)
    return next(one for one in found if one.check == STEERING)


@pytest.mark.slow
async def test_doctor_finds_whether_requests_are_steered_now() -> None:
    async with running(workers=1) as system:
        await system.send(chat("a"))
        one = await steering_of(system)
        assert one.verdict is Severity.RIGHT
        assert one.says.startswith("requests are steered now: ")
        await set_steering(system, 0)
        one = await steering_of(system)
        assert one.verdict is Severity.NOTE
        assert one.says.startswith("requests are observed now,")
        await system.stop_router()  # Envoy goes on without it
        one = await steering_of(system)
        assert one.code == "router-down"
        assert one.says.startswith("requests are not steered now: Envoy let 1 of 1 pass")


@pytest.mark.slow
async def test_doctor_finds_a_router_that_hangs() -> None:
    async with running(workers=1) as system:
        assert system.router is not None
        system.router.send_signal(signal.SIGSTOP)
        one = await steering_of(system)
        system.router.send_signal(signal.SIGCONT)
        assert one.code == "router-down"


async def test_doctor_finds_features_of_which_nothing_comes(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    tenants = {"header": "x-tenant", "secret_file": str(secret), "without_tenant": "common"}
    classes = {"header": "x-class", "default": "a", "of": [{"name": "a"}, {"name": "b"}]}
    changes = {
        "isolation": tenants,
        "policy": {"classes": classes},
        "stores": [{"name": "s"}],
    }
    async with running(workers=1, changes=changes) as system:
        for number in range(LEAST_REQUESTS):
            await system.send(chat(long_text(str(number))))
        config = load(str(system.config_file))
        found = await examine(config, SECONDS, probes=False, bounds=BRIEF)
    assert {"isolation-header", "store-silent"} <= {one.code for one in found}
    assert any("x-class does not reach the router" in one.says for one in found)
    assert any("all have the priority 0" in one.says for one in found)
