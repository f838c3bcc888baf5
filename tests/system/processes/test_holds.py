"""Requests that the router holds for longer than Envoy's message_timeout, with a real Envoy."""

import asyncio
import contextlib
import re
import sys
import time
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import aiohttp
import pytest
import yaml

from extproc.config.reader import parse
from extproc.envoy.envoy_config import render
from tests.system.configuration import configuration
from tests.system.envoy_process import running_envoy
from tests.system.gateway import BUFFERED, DUPLEX, Gateway, Tree, gateway, pool
from tests.system.parts import Part
from tests.system.processes.holding_router import ASKED_SECONDS, Holding
from tests.waiting import until

HOLD_SECONDS = 3.0
MESSAGE_TIMEOUT_MS = 1_000  # half a second, which is usual, may be too short on a busy machine
HOLDS: Tree = {"policy": {"hold": {"enabled": True}}}
HASTY: Tree = {
    "extproc": {"deadline_ms": 250},
    "envoy": {"message_timeout_ms": MESSAGE_TIMEOUT_MS},
}
AT_ONCE = 8  # if Envoy chose between two workers, all would go where they should once in 256 runs
SHORT = "1s"


class Held(NamedTuple):
    """A gateway whose router holds requests, and Envoy's admin server."""

    gateway: Gateway
    holding: Holding
    admin: str

    async def counted(self, name: str) -> int:
        """What Envoy's ext_proc filter counts."""
        url = f"{self.admin}/stats?filter=ext_proc"
        async with self.gateway.session.get(url) as response:
            found = re.search(rf"ext_proc\.{name}: (\d+)", await response.text())
            return int(found[1]) if found else 0


@contextlib.asynccontextmanager
async def held(
    dialect: str = BUFFERED,
    seconds: float = HOLD_SECONDS,
    sections: Mapping[str, Any] = MappingProxyType({}),
    manager: Mapping[str, Any] = MappingProxyType({}),
    action: Mapping[str, Any] = MappingProxyType({}),
) -> AsyncIterator[Held]:
    """Two workers, a router that holds each request for so long, and Envoy.

    sections: of the router's configuration. manager, action: more settings of Envoy's connection
    manager, and of its only route.
    """
    ports: list[int] = []

    def edit(tree: Tree) -> None:
        ports.append(tree["admin"]["address"]["socket_address"]["port_value"])
        (listener,) = tree["static_resources"]["listeners"]
        settings = listener["filter_chains"][0]["filters"][0]["typed_config"]
        settings.update(manager)
        (host,) = settings["route_config"]["virtual_hosts"]
        host["routes"][0]["route"].update(action)

    changes = {**HOLDS, **sections}
    async with pool(2) as workers, gateway(dialect, workers, changes=changes, edits=[edit]) as one:
        holding = Holding(seconds)
        one.router.route = partial(holding.route, one.router)  # type: ignore[method-assign]
        yield Held(one, holding, f"http://127.0.0.1:{ports[0]}")


async def timed(one: Gateway) -> tuple[int, str, float]:
    """The status of a request, the worker that answered, and the seconds that it took."""
    began = time.monotonic()
    status, worker, _ = await one.post()
    return status, worker, time.monotonic() - began


@pytest.mark.slow
async def test_held_requests_are_answered_by_the_pick_after_the_hold() -> None:
    async with held(sections=HASTY) as one:
        answers = await asyncio.gather(*(timed(one.gateway) for _ in range(AT_ONCE)))
        assert [status for status, _, _ in answers] == [200] * AT_ONCE
        assert min(seconds for _, _, seconds in answers) >= HOLD_SECONDS
        assert sorted(worker for _, worker, _ in answers) == sorted(one.holding.picks)
        assert one.holding.granted == [True] * AT_ONCE
        assert await one.counted("override_message_timeout_received") == AT_ONCE
        assert await one.counted("failure_mode_allowed") == 0


@pytest.mark.parametrize("dialect", [BUFFERED, DUPLEX])
async def test_wait_ends_when_the_client_goes(dialect: str) -> None:
    async with held(dialect, seconds=600.0) as one:
        asked = asyncio.create_task(one.gateway.post())
        await until(lambda: one.holding.held == 1)
        asked.cancel()
        await until(lambda: one.holding.given_up == 1, "the wait is cancelled")
        await until(lambda: one.gateway.metrics.open_streams == 0)


@pytest.mark.slow
async def test_gateway_with_the_endpoint_picker_protocol_waits_for_as_long() -> None:
    async with held(DUPLEX, sections=HASTY) as one:
        status, worker, seconds = await timed(one.gateway)
        assert (status, [worker]) == (200, one.holding.picks)
        assert one.holding.granted == [True]
        assert seconds >= HOLD_SECONDS
        assert await one.counted("message_timeouts") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("manager", "action", "passes"),
    [
        ({"stream_idle_timeout": SHORT}, {}, False),
        ({"stream_idle_timeout": SHORT}, {"idle_timeout": "0s"}, True),
        ({}, {"idle_timeout": SHORT}, False),
        ({"request_timeout": SHORT}, {}, True),
        ({"common_http_protocol_options": {"max_stream_duration": SHORT}}, {}, False),
        ({}, {"max_stream_duration": {"max_stream_duration": SHORT}}, False),
        ({}, {"timeout": SHORT}, True),
    ],
)
async def test_limits_of_envoy_end_a_hold_as_the_doctor_says(
    manager: Tree, action: Tree, *, passes: bool
) -> None:
    async with held(manager=manager, action=action) as one:
        status, _, seconds = await timed(one.gateway)
        assert (status == 200) is passes
        assert (
            seconds >= HOLD_SECONDS
        ) is passes  # nor does Envoy's own answer wait for the router
        await until(lambda: one.gateway.metrics.open_streams == 0)
        assert one.holding.given_up == (0 if passes else len(one.holding.granted))


@pytest.mark.slow
async def test_held_requests_are_answered_at_once_when_the_router_is_killed(tmp_path: Path) -> None:
    async with pool(2) as workers:
        fleet = {"models": [{"name": "m"}], "workers": [{"endpoint": one} for one in workers]}
        written = configuration({**HOLDS, **HASTY, **fleet})
        file = tmp_path / "kvsteer.yaml"
        file.write_text(yaml.safe_dump(written))
        command = [sys.executable, "-m", "tests.system.processes.holding_router", "600", "serve"]
        listen = written["extproc"]["listen"]
        router = Part("router", [*command, "--config", str(file)], tmp_path / "log", listen)
        admin_port = int(written["envoy"]["admin"].rpartition(":")[2])
        text = render(parse(file.read_text(), "test"))
        url = f"http://{written['envoy']['listen']}/v1/completions"
        async with running_envoy(text, admin_port), aiohttp.ClientSession() as session:
            router.start()
            try:
                await asyncio.to_thread(router.wait)
                body = {"model": "m", "prompt": [1, 2, 3]}
                asked = [asyncio.create_task(_status(session, url, body)) for _ in range(AT_ONCE)]
                await asyncio.sleep(HOLD_SECONDS)
                assert not any(one.done() for one in asked)
            finally:
                router.kill()
            killed = time.monotonic()
            assert await asyncio.gather(*asked) == [200] * AT_ONCE
            assert time.monotonic() - killed < ASKED_SECONDS / 2


async def _status(session: aiohttp.ClientSession, url: str, body: Tree) -> int:
    async with session.post(url, json=body) as response:
        return response.status
