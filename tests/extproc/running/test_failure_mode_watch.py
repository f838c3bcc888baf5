"""An Envoy that fails open where `isolation.fail: closed` promises otherwise is shown."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from extproc.config.reader import load
from extproc.envoy.envoy_config import render
from extproc.envoy.failure_mode import fails_open
from extproc.running.failure_mode_watch import FailureModeWatch, is_promised
from tests.faults import said
from tests.ports import free_port
from tests.waiting import until

TYPE = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"


def dump(**fields: object) -> bytes:
    return json.dumps({"configs": [{"x": [{"typed_config": {"@type": TYPE, **fields}}]}]}).encode()


@pytest.mark.parametrize(
    ("content", "is_open"),
    [
        (dump(failure_mode_allow=True), True),
        (dump(failure_mode_allow=False), False),
        (dump(), False),
        (b'{"failure_mode_allow": true}', False),
        (b"", False),
        (b"[" * 100_000, False),
        (b"[%b0]" % (b"0," * 1_000_001), False),
    ],
)
def test_fails_open_is_read_from_the_filter_itself(content: bytes, is_open: bool) -> None:
    assert fails_open(content) is is_open


@contextlib.asynccontextmanager
async def admin(contents: list[bytes]) -> AsyncIterator[str]:
    """Envoy's admin server; it answers with the last of these."""

    async def get(_: web.Request) -> web.Response:
        return web.Response(body=contents[-1])

    application = web.Application()
    application.router.add_get("/config_dump", get)
    runner, port = web.AppRunner(application), free_port()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await runner.cleanup()


async def test_fault_is_noted_until_envoy_is_corrected() -> None:
    contents = [dump(failure_mode_allow=True)]
    async with admin(contents) as at:
        watch = FailureModeWatch(at, 0.01)
        following = asyncio.create_task(watch.follow())

        async def is_noted() -> bool:
            return "failure_mode_allow: false" in said(watch)

        async def is_well() -> bool:
            return not said(watch)

        await until(is_noted, "the fault is noted")
        contents.append(dump())
        await until(is_well, "the fault is gone")
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@pytest.mark.parametrize("content", [b"{", dump(x="y" * 17 * 1024 * 1024, failure_mode_allow=True)])
async def test_envoy_that_says_nothing_readable_is_not_judged(content: bytes) -> None:
    async with admin([content]) as at:
        watch = FailureModeWatch(at, 0.0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(watch.follow(), 0.5)
        assert said(watch) == ""


async def test_envoy_that_does_not_answer_is_not_judged() -> None:
    watch = FailureModeWatch(f"127.0.0.1:{free_port()}", 0.0)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(watch.follow(), 0.2)
    assert said(watch) == ""


@pytest.mark.parametrize(
    ("rules", "is_closed"), [("", True), (", fail: closed", True), (", fail: open", False)]
)
def test_envoys_configuration_fails_closed_with_tenants_unless_told_otherwise(
    tmp_path: Path, rules: str, is_closed: bool
) -> None:
    file = tmp_path / "kvsteer.yaml"
    isolation = f"isolation: {{header: x-tenant, secret_file: s{rules}}}"
    file.write_text(f"models: [{{name: m}}]\nworkers: [{{endpoint: '10.0.0.1:1'}}]\n{isolation}\n")
    config = load(str(file))
    assert is_promised(config) is is_closed
    assert ("failure_mode_allow: true" in render(config)) is not is_closed
