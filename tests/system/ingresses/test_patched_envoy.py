"""`kvsteer envoy --patch` on the file of an Envoy with TLS, another route, Lua and retries."""

import json
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from string import Template
from typing import Any

import pytest
import pytest_asyncio
import trustme
from aiohttp import web

from tests.http_server import serving
from tests.ports import free_port
from tests.system.envoy_process import ENVOY
from tests.system.ingresses.existing_envoy import Tree, behind
from tests.system.system import System, chat, long_text
from tests.waiting import until

THEIRS = Path(__file__).with_name("users_envoy.yaml")
DESTINATION = "x-gateway-destination-endpoint"

pytestmark = pytest.mark.asyncio(loop_scope="module")


def validate(file: Path) -> None:
    command = [str(ENVOY), "--mode", "validate", "-c", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Patched:
    """The system behind a patched Envoy, and what a client of it needs."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.shop_port = free_port()
        authority = trustme.CA()
        authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(
            str(directory / "edge.pem")
        )
        self.client = ssl.create_default_context()
        authority.configure_trust(self.client)
        self.system: System

    def patched(self, plain: Tree, _: int) -> str:
        """The user's file for the same ports, patched by the command."""
        (listener,) = plain["static_resources"]["listeners"]
        (group,) = plain["static_resources"]["clusters"][0]["load_assignment"]["endpoints"]
        members = [one["endpoint"]["address"] for one in group["lb_endpoints"]]
        first, second = (one["socket_address"]["port_value"] for one in members)
        pem = str(self.directory / "edge.pem")
        text = Template(THEIRS.read_text()).substitute(
            port=listener["address"]["socket_address"]["port_value"],
            admin=plain["admin"]["address"]["socket_address"]["port_value"],
            first=first,
            second=second,
            shop=self.shop_port,
            certificate=pem,
            key=pem,
            log=self.directory / "access.log",
        )
        theirs = self.directory / "envoy.yaml"
        theirs.write_text(text)
        return self.patch(theirs, "--access-log").stdout

    def patch(self, file: Path, *options: str) -> "subprocess.CompletedProcess[str]":
        """Runs the command with a file."""
        config = str(self.directory / "kvsteer.yaml")
        command = [sys.executable, "-m", "extproc", "envoy", "--config", config]
        done = subprocess.run(
            [*command, "--patch", str(file), *options], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done

    async def shop(self, **headers: str) -> dict[str, str]:
        """What the shop sees of a request's headers."""
        system = self.system
        answer = await system.session.get(
            f"{system.envoy}/shop/v1/chat/completions", headers=headers, ssl=self.client
        )
        seen: dict[str, str] = await answer.json()
        return seen

    async def send(self, body: dict[str, Any], **headers: str) -> str:
        """The worker that answers a chat request."""
        status, worker, _ = await self.system.send(body, headers=headers, ssl=self.client)
        assert status == 200
        return worker

    async def warmed(self, seed: str) -> tuple[dict[str, Any], str]:
        """A request whose prompt one worker holds, and that worker."""
        body = chat(long_text(seed), model="my-model")
        holder = await self.send(body)
        await self.system.learned(body, holder)
        return body, holder


async def _echo(request: web.Request) -> web.Response:
    return web.json_response({name.lower(): value for name, value in request.headers.items()})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def patched(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Patched]:
    one = Patched(tmp_path_factory.mktemp("patched"))
    async with (
        serving(_echo, one.shop_port),
        behind(one.directory, one.patched) as system,
    ):
        system.envoy = system.envoy.replace("http:", "https:")
        one.system = system
        await system.start_router()
        yield one


async def test_follow_up_reaches_the_worker_that_holds_its_prompt(patched: Patched) -> None:
    for seed in ("alpha", "beta", "gamma"):
        body, holder = await patched.warmed(seed)
        assert {await patched.send(body) for _ in range(4)} == {holder}


async def test_other_route_never_asks_the_router_and_keeps_its_filter(
    patched: Patched,
) -> None:
    decided = 'kvsteer_decisions_total{model="",reason="not_inference"}'
    before = await patched.system.metric(decided)
    seen = await patched.shop()
    assert DESTINATION not in seen
    assert seen["x-seen"] == "yes"
    assert await patched.system.metric(decided) == before


async def test_destination_header_of_a_client_is_removed_and_steers_nothing(
    patched: Patched,
) -> None:
    assert DESTINATION not in await patched.shop(**{DESTINATION: "10.0.0.1:1"})
    body, holder = await patched.warmed("delta")
    (other,) = {one.endpoint for one in patched.system.workers} - {holder}
    assert await patched.send(body, **{DESTINATION: other}) == holder


async def test_access_log_names_the_picked_and_the_answering_worker(
    patched: Patched,
) -> None:
    body, holder = await patched.warmed("epsilon")
    await patched.send(body)
    log = patched.directory / "access.log"

    async def is_written() -> bool:
        return bool(_steered_to(log, holder))

    await until(is_written, "a line of the access log")
    assert all(line["kvsteer_picked"].startswith(holder) for line in _steered_to(log, holder))


def _steered_to(log: Path, worker: str) -> list[dict[str, str]]:
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")]
    return [line for line in lines if line["kvsteer_answered"] == worker and line["kvsteer_picked"]]


@pytest.mark.slow
async def test_patch_is_idempotent_and_its_result_is_valid(
    patched: Patched,
) -> None:
    once, twice = patched.directory / "once.yaml", patched.directory / "twice.yaml"
    once.write_text(patched.patch(patched.directory / "envoy.yaml").stdout)
    again = patched.patch(once)
    twice.write_text(again.stdout)
    assert "KVSteer is already in it" in again.stderr
    assert twice.read_bytes() == once.read_bytes()
    assert patched.patch(once, "--diff").stdout == ""
    validate(once)


async def test_requests_without_the_router_are_answered(patched: Patched) -> None:
    body = chat(long_text("zeta"), model="my-model")
    await patched.system.stop_router()
    try:
        for _ in range(6):
            await patched.send(body, **{DESTINATION: patched.system.workers[0].endpoint})
    finally:
        await patched.system.start_router()
