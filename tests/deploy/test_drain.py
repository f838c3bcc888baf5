"""The sidecar overlay's preStop, against a real Envoy that streams an answer."""

import asyncio
import contextlib
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp import web

from extproc.config.reader import parse
from extproc.envoy.envoy_config import render
from tests.deploy.manifests import KUBERNETES, containers, of_kind, pod_templates
from tests.ports import free_port
from tests.system.envoy_process import running_envoy
from tests.system.gateway import served
from tests.waiting import until

DRAIN = KUBERNETES / "overlays/sidecar/drain.sh"
PIECES = 20
WAIT_SECONDS = 60.0


@dataclass
class Pair:
    """Envoy and one worker, whose answers end once `may_end` is set."""

    url: str
    admin_port: int
    session: aiohttp.ClientSession
    may_end: asyncio.Event = field(default_factory=asyncio.Event)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """The worker's answer: a piece, a wait, and the rest."""
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"x")
        await self.may_end.wait()
        await response.write(b"x" * (PIECES - 1))
        return response

    async def drain(self, limit: int) -> Process:
        """Starts the hook that Kubernetes runs before it stops the container; 0 s of notice."""
        arguments = map(str, (limit, 0, self.admin_port))
        return await asyncio.create_subprocess_exec(
            "bash", str(DRAIN), *arguments, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE
        )

    async def refuses(self) -> None:
        """Waits until a new client is refused."""
        port = int(self.url.rpartition(":")[2])

        async def is_refused() -> bool:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                return True
            writer.close()
            return False

        await until(is_refused)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    worker, clients, admin, nobody = (free_port() for _ in range(4))
    config = parse(
        f"models: [{{name: m, tokenizer: {{remote: true}}}}]\n"
        f"workers: [{{endpoint: '127.0.0.1:{worker}'}}]\n"
        f"extproc: {{listen: '127.0.0.1:{nobody}'}}\n"
        f"envoy: {{listen: '127.0.0.1:{clients}', admin: '127.0.0.1:{admin}'}}\n",
        "kvsteer.yaml",
    )
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(aiohttp.ClientSession())
        one = Pair(f"http://127.0.0.1:{clients}", admin, session)
        app = web.Application()
        app.router.add_get("/", one.stream)
        await stack.enter_async_context(served(app, worker))
        await stack.enter_async_context(running_envoy(render(config), admin))
        yield one
        one.may_end.set()


async def ended(process: Process) -> int:
    return await asyncio.wait_for(process.wait(), WAIT_SECONDS)


async def test_drain_finishes_open_streams_and_admits_no_other(pair: Pair) -> None:
    async with pair.session.get(pair.url) as response:
        assert await response.content.readexactly(1) == b"x"
        draining = await pair.drain(60)
        await pair.refuses()
        assert draining.returncode is None
        pair.may_end.set()
        assert await response.content.read() == b"x" * (PIECES - 1)
    assert await ended(draining) == 0


async def test_drain_waits_for_an_endless_stream_until_the_limit(pair: Pair) -> None:
    async with pair.session.get(pair.url) as response:
        await response.content.readexactly(1)
        draining = await pair.drain(1)
        _, said = await asyncio.wait_for(draining.communicate(), WAIT_SECONDS)
        assert not pair.may_end.is_set()
    assert (draining.returncode, said) == (1, b"requests still under way after 1 s: 1\n")


async def test_draining_envoy_closes_client_connections(pair: Pair) -> None:
    async with pair.session.get(pair.url) as first:
        await first.content.readexactly(1)  # keeps the drain from ending
        pair.may_end.set()
        async with pair.session.post(f"http://127.0.0.1:{pair.admin_port}/healthcheck/fail"):
            pass
        async with pair.session.get(pair.url) as second:
            assert second.headers["connection"] == "close"


async def test_drain_ends_at_once_without_streams_or_without_envoy(
    pair: Pair,
) -> None:
    assert await ended(await pair.drain(3600)) == 0
    pair.admin_port = free_port()
    assert await ended(await pair.drain(3600)) == 0


def test_pod_has_more_time_than_its_drain() -> None:
    (template,) = [one for one in pod_templates("sidecar") if one["spec"].get("initContainers")]
    (envoy,) = [one for one in containers(template) if one["name"] == "envoy"]
    command = envoy["lifecycle"]["preStop"]["exec"]["command"]
    shell, script, limit, notice = command
    (mount,) = [one for one in envoy["volumeMounts"] if script.startswith(one["mountPath"] + "/")]
    (volume,) = [one for one in template["spec"]["volumes"] if one["name"] == mount["name"]]
    (files,) = [
        one["data"]
        for one in of_kind("sidecar", "ConfigMap")
        if one["metadata"]["name"] == volume["configMap"]["name"]
    ]
    assert (shell, files[script.rpartition("/")[2]]) == ("bash", DRAIN.read_text())
    assert int(limit) >= 300
    assert template["spec"]["terminationGracePeriodSeconds"] >= int(limit) + int(notice) + 20
