"""The way of docs/start.md to add the router to an Envoy that exists, step by step."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio
import yaml

from tests.ports import free_port
from tests.system.ingresses.existing_envoy import (
    Tree,
    add,
    address,
    behind,
    connection_manager,
    fragments,
)
from tests.system.system import System, all_answer, chat, long_text
from tests.waiting import until


def steered(envoy: Tree, router_port: int) -> Tree:
    """The user's envoy.yaml with every piece of envoy/add-to-your-envoy.yaml where it belongs."""
    manager, engines, router, host, _ = fragments()
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


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    """For tests that leave the system as it was."""
    async with behind(tmp_path_factory.mktemp("system"), steered) as one:
        await one.start_router()
        yield one


async def kvsteer(*arguments: str, given: str = "") -> tuple[int, str]:
    """Runs a command: exit status and what it prints."""
    command = [sys.executable, "-m", "extproc", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    output, _ = await process.communicate(given.encode())
    return process.returncode or 0, output.decode()


async def test_request_is_steered_once_the_fragments_are_added(system: System) -> None:
    for seed in ("alpha", "beta", "gamma"):
        body = chat(long_text(seed), model="my-model")
        _, holder, _ = await system.send(body)
        await system.learned(body, holder)
        answers = [await system.send(body) for _ in range(3)]
        assert {(status, worker) for status, worker, _ in answers} == {(200, holder)}
        cached = [answer["usage"]["prompt_tokens_details"] for _, _, answer in answers]
        assert all(one["cached_tokens"] > 0 for one in cached)


async def test_commands_of_the_steps_exit_0_and_name_the_workers(system: System) -> None:
    status, _ = await kvsteer("check", "--config", str(system.config_file))
    assert status == 0
    body = chat(long_text("alpha"), model="my-model")
    status, printed = await kvsteer("explain", "--admin", system.admin, given=json.dumps(body))
    assert status == 0
    endpoints = {worker.endpoint for worker in system.workers}
    assert all(endpoint in printed for endpoint in endpoints)
    states = [feed["state"] for worker in await system.status() for feed in worker["feeds"]]
    assert states == ["live", "live"]


async def test_requests_are_answered_with_the_fragments_and_without_a_router(
    tmp_path: Path,
) -> None:
    async with behind(tmp_path, steered) as system:
        headers = {"x-gateway-destination-endpoint": system.workers[0].endpoint}
        body = chat(long_text("alpha"), model="my-model")
        workers = [one.endpoint for one in system.workers]
        await all_answer(lambda: system.send(body, headers=headers), workers)


async def test_dead_router_of_two_is_soon_asked_no_more(tmp_path: Path) -> None:
    second_port = free_port()
    (tmp_path / "second").mkdir()

    def with_two(envoy: Tree, router_port: int) -> Tree:
        tree = steered(envoy, router_port)
        (locality,) = tree["static_resources"]["clusters"][-1]["load_assignment"]["endpoints"]
        another = {"endpoint": {"address": address("127.0.0.1", second_port)}}
        locality["lb_endpoints"].append(another)
        return tree

    async with behind(tmp_path, with_two) as system:
        second = another_router(system, tmp_path / "second", second_port)
        await asyncio.gather(system.start_router(), second.start_router())
        body = chat(long_text("alpha"), model="my-model")
        assert {(await system.send(body))[0] for _ in range(10)} == {200}
        await second.stop_router()

        async def is_ejected() -> bool:
            await system.send(body)
            return bool((await ejections(system)).active)

        await until(is_ejected, "the dead router is ejected")
        missed: list[int] = []  # of each request during which the dead one was ejected all the time
        while len(missed) < 20:
            before, unsteered_before = await ejections(system), await unsteered(system)
            assert (await system.send(body))[0] == 200
            if before.active and before == await ejections(system):
                missed.append(await unsteered(system) - unsteered_before)
        # half of them without an ejection; one may begin before Envoy's thread has heard of it
        assert sum(missed) <= 1


async def test_route_that_is_not_for_workers_never_asks_the_router(tmp_path: Path) -> None:
    def with_other_route(envoy: Tree, router_port: int) -> Tree:
        tree = steered(envoy, router_port)
        (*_, switched_off) = fragments()
        (host,) = connection_manager(tree)["route_config"]["virtual_hosts"]
        other = {"match": {"prefix": "/api/"}, "route": {"cluster": "engines"}, **switched_off}
        host["routes"].insert(0, other)
        return tree

    async with behind(tmp_path, with_other_route) as system:
        await system.start_router()
        for _ in range(3):
            await (await system.session.get(f"{system.envoy}/api/things")).read()
        name = 'kvsteer_decisions_total{model="",reason="not_inference"}'
        assert await system.metric(name) == 0
        await (await system.session.get(f"{system.envoy}/v1/models")).read()
        assert await system.metric(name) == 1


def another_router(system: System, directory: Path, port: int) -> System:
    """A second router in front of the same workers."""
    tree = yaml.safe_load(system.config_file.read_text())
    tree["extproc"]["listen"] = f"127.0.0.1:{port}"
    for name in ("admin", "metrics"):
        tree[name]["listen"] = f"127.0.0.1:{free_port()}"
    config_file = directory / "kvsteer.yaml"
    config_file.write_text(yaml.safe_dump(tree))
    return System(system.session, config_file, system.workers)


class Ejections(NamedTuple):
    """How many routers Envoy has ejected: in all, and now."""

    total: int
    active: int


async def ejections(system: System) -> Ejections:
    url = f"{system.envoy_admin}/stats?format=json&filter=kvsteer.outlier_detection.ejections_"
    async with system.session.get(url) as got:
        stats = (await got.json(content_type=None))["stats"]
    values = {one["name"].rpartition(".ejections_")[2]: one["value"] for one in stats}
    return Ejections(values["enforced_total"], values["active"])


async def unsteered(system: System) -> int:
    """How many requests Envoy sent on without a router's answer, by its own count."""
    async with system.session.get(f"{system.envoy_admin}/stats?filter=failure_mode_allowed") as got:
        (line,) = (await got.text()).splitlines()
    return int(line.rpartition(" ")[2])


async def test_events_switch_off_leaves_requests_answered_and_on_follows_feeds_again(
    system: System,
) -> None:
    async def states() -> list[str]:
        return [feed["state"] for worker in await system.status() for feed in worker["feeds"]]

    async def are_live() -> bool:
        return await states() == ["live", "live"]

    async def switch(*, on: bool) -> None:
        switched = {"enabled": on}
        async with system.session.post(f"{system.admin}/events", json=switched) as response:
            assert response.status == 200

    body = chat(long_text("switched off"), model="my-model")
    await switch(on=False)
    assert {(await system.send(body))[0] for _ in range(3)} == {200}
    assert "live" not in await states()
    await switch(on=True)
    await until(are_live, "the feeds are followed again")
