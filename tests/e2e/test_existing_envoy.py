"""README.md's way to add the router to an Envoy that exists, step by step."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.e2e.existing_envoy import Tree, add, address, behind, connection_manager, fragments
from tests.e2e.system import System, chat, long_text


def steered(envoy: Tree, router_port: int) -> Tree:
    """The user's envoy.yaml with every piece of envoy/add-to-your-envoy.yaml where it belongs."""
    manager, engines, router, host = fragments()
    add(connection_manager(envoy), manager)
    (cluster,) = envoy["static_resources"]["clusters"]
    del cluster["lb_policy"]
    add(cluster, engines)
    (endpoint,) = router["load_assignment"]["endpoints"][0]["lb_endpoints"]
    assert endpoint["endpoint"]["address"] == address("127.0.0.1", 9002)
    endpoint["endpoint"]["address"] = address("127.0.0.1", router_port)
    envoy["static_resources"]["clusters"].append(router)
    add(connection_manager(envoy)["route_config"]["virtual_hosts"][0], host)
    return envoy


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[System]:
    async with behind(tmp_path, steered) as one:
        await one.start_router()
        yield one


async def kvsteer(*arguments: str, given: str = "") -> tuple[int, str]:
    """Runs a command: exit status and what it prints."""
    command = [sys.executable, "-m", "extproc", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    output, _ = await process.communicate(given.encode())
    return process.returncode or 0, output.decode()


async def test_a_request_is_steered_once_the_pieces_were_added(system: System) -> None:
    for seed in ("alpha", "beta", "gamma"):
        body = chat(long_text(seed), model="my-model")
        _, holder, _ = await system.send(body)
        await system.learned(body, holder)
        answers = [await system.send(body) for _ in range(3)]
        assert {(status, worker) for status, worker, _ in answers} == {(200, holder)}
        cached = [answer["usage"]["prompt_tokens_details"] for _, _, answer in answers]
        assert all(one["cached_tokens"] > 0 for one in cached)


async def test_the_commands_of_the_steps_say_what_they_should(system: System) -> None:
    status, _ = await kvsteer("check", "--config", str(system.config_file))
    assert status == 0
    body = chat(long_text("alpha"), model="my-model")
    status, printed = await kvsteer("explain", "--admin", system.admin, given=json.dumps(body))
    assert status == 0
    endpoints = {worker.endpoint for worker in system.workers}
    assert all(endpoint in printed for endpoint in endpoints)
    states = [feed["state"] for worker in await system.status() for feed in worker["feeds"]]
    assert states == ["live", "live"]


async def test_with_the_pieces_and_without_a_router_everything_is_answered(tmp_path: Path) -> None:
    async with behind(tmp_path, steered) as system:
        headers = {"x-gateway-destination-endpoint": system.workers[0].endpoint}
        body = chat(long_text("alpha"), model="my-model")
        answers = [await system.send(body, headers=headers) for _ in range(20)]
    assert {status for status, _, _ in answers} == {200}
    assert {worker for _, worker, _ in answers} == {one.endpoint for one in system.workers}


async def test_switched_off_it_goes_on_by_load_alone(system: System) -> None:
    body = chat(long_text("alpha"), model="my-model")
    off = {"enabled": False}
    async with system.session.post(f"{system.admin}/events", json=off) as response:
        assert response.status == 200
    assert {(await system.send(body))[0] for _ in range(3)} == {200}
    states = [feed["state"] for worker in await system.status() for feed in worker["feeds"]]
    assert "live" not in states
