"""A router in its own process, with one unreachable worker."""

import asyncio
import contextlib
import shutil
import subprocess
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
import yaml

from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from tests.extproc.messages import body, head
from tests.extproc.serving.running import PROCESS, PROMPT
from tests.ports import free_port
from tests.waiting import until

# Runs a command as process 1 of its own namespace, as containers do; both end together.
AS_FIRST_PROCESS = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


def _has_namespaces() -> bool:
    if shutil.which("unshare") is None:
        return False
    tried = subprocess.run([*AS_FIRST_PROCESS, "true"], capture_output=True, check=False)
    return tried.returncode == 0


needs_namespaces = pytest.mark.skipif(
    not _has_namespaces(),
    reason="needs unshare (util-linux) and a kernel that lets this user make namespaces",
)


def first_process(unshare: int) -> int:
    """The process id, seen from outside the namespace, of the command that `unshare` runs."""
    return int(Path(f"/proc/{unshare}/task/{unshare}/children").read_text())


class Router:
    """One process, and a channel to it."""

    def __init__(self, process: Process, log: Path, listen: str, metrics: str) -> None:
        self.process = process
        self.log = log
        self.metrics = metrics
        self.channel = grpc.aio.insecure_channel(listen, [("grpc.use_local_subchannel_pool", 1)])

    async def placed(self) -> grpc.aio.StreamStreamCall:
        """A stream whose request is under way."""
        call = self.channel.stream_stream(
            PROCESS,
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )()
        await call.write(head("/v1/completions"))
        await call.read()
        await call.write(body(PROMPT))
        assert (await call.read()).WhichOneof("response") == "request_body"
        return call

    async def ready(self) -> int:
        """The status of GET /readyz; 0 if nobody answers."""
        return (await self._readyz())[0]

    async def readiness_words(self) -> str:
        """The text of GET /readyz; "" if nobody answers."""
        return (await self._readyz())[1]

    async def _readyz(self) -> tuple[int, str]:
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://{self.metrics}/readyz") as response,
            ):
                return response.status, await response.text()
        except aiohttp.ClientError:
            return 0, ""

    async def answers(self, status: int) -> bool:
        """Whether GET /readyz answers with this status."""
        assert self.process.returncode is None, self.log.read_text()
        return await self.ready() == status


@contextlib.asynccontextmanager
async def router(
    folder: Path,
    listen: str,
    sections: dict[str, Any] | None = None,
    status: int = 200,
    before: Sequence[str] = (),
    **options: Any,
) -> AsyncIterator[Router]:
    """Runs a router; yields it once GET /readyz has this status.

    sections: those to replace in the configuration. before: the command that runs the router.
    options: more keys of `extproc`.
    """
    metrics = f"127.0.0.1:{free_port()}"
    whole = {
        "extproc": {"listen": listen, **options},
        "admin": {"listen": f"127.0.0.1:{free_port()}"},
        "metrics": {"listen": metrics},
        "models": [{"name": "m"}],
        "workers": [{"endpoint": "127.0.0.1:1"}],
        **(sections or {}),
    }
    file = folder / "kvsteer.yaml"
    file.write_text(yaml.safe_dump(whole))
    command = [*before, sys.executable, "-m", "extproc", "serve", "--config", str(file)]
    log = folder / "router.log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stderr=errors)
    one = Router(process, log, listen, metrics)
    try:
        await until(lambda: one.answers(status), f"GET /readyz answers {status}")
        yield one
    finally:
        await one.channel.close()
        if process.returncode is None:
            process.kill()
        await process.wait()
