"""The contestants: each has an address that wrk sends to, and a process whose CPU is counted."""

import json
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from extproc_load import MARK
from extproc_parts import (
    HERE,
    TINY_MODEL,
    UPSTREAMS,
    Fleet,
    Process,
    envoy_binary,
    envoy_configuration,
    found_smg,
    free_address,
    running,
    upstream_configuration,
)
from measure import CannotRunError, missed

LEARN_SECONDS = 120.0

PLAIN, GRPC_AIO, GRPCLIB = "no ext_proc", "grpc.aio, idle", "grpclib, idle"
LEAN_IDLE, OURS_LEAN = "lean, idle", "KVSteer, lean"
OURS_UNIX, OURS_TWO = "KVSteer, Unix socket", "KVSteer, 2 processes"
SMG = "SMG, cache_aware"
NAMES = (PLAIN, GRPC_AIO, GRPCLIB, LEAN_IDLE, OURS_LEAN, SMG)


@dataclass(frozen=True, slots=True)
class Contestant:
    """A running contestant.

    url: where requests are sent. decides: the process that picks. proxies: its Envoy. admin: the
    router's URL for administration. helps: the process that the picker calls. metrics: the URL of
    its metrics.
    """

    url: str
    decides: Process | None
    proxies: Process | None
    admin: str | None = None
    helps: Process | None = None
    metrics: str | None = None


class Arena:
    """Starts all contestants; those that cannot run are in `missing`, with the reason.

    names: of the contestants. prefix: words before a command, by the process's name. upstreams: how
    many there are, at least `UPSTREAMS`, of which so many hold the conversations.
    """

    def __init__(
        self,
        stack: ExitStack,
        directory: Path,
        names: Sequence[str] = NAMES,
        prefix: Callable[[str], Sequence[str]] = lambda _: (),
        upstreams: int = UPSTREAMS,
    ) -> None:
        self._upstreams = max(upstreams, UPSTREAMS)
        self._stack = stack
        self._prefix = prefix
        self._directory = directory
        self._envoy = envoy_binary()
        self._fleet = self._started_fleet()
        self.missing: dict[str, str] = {}
        self.contestants: dict[str, Contestant] = {}
        for name, start in self._starters().items():
            if name not in names:
                continue
            try:
                self.contestants[name] = start()
            except CannotRunError as error:
                self.missing[name] = missed(error)

    def _starters(self) -> dict[str, Callable[[], Contestant]]:
        """Returns how each is started, in order."""
        unix = f"unix:{self._directory}/router.sock"
        return {
            PLAIN: lambda: self._behind_envoy(PLAIN, None),
            GRPC_AIO: lambda: self._idle(GRPC_AIO, "grpc.aio"),
            GRPCLIB: lambda: self._idle(GRPCLIB, "grpclib"),
            LEAN_IDLE: lambda: self._idle(LEAN_IDLE, "lean"),
            OURS_LEAN: lambda: self._ours(OURS_LEAN),
            OURS_UNIX: lambda: self._ours(OURS_UNIX, unix),
            OURS_TWO: lambda: self._ours(OURS_TWO, processes=2),
            SMG: self._smg,
        }

    def learn(self, requests: Sequence[dict[str, Any]]) -> None:
        """Has each worker compute its share, and waits until the routers know all blocks."""
        for number, request in enumerate(requests):
            post(
                f"http://{self._fleet.workers[number % UPSTREAMS]}", "/v1/chat/completions", request
            )
        for contestant in self.contestants.values():
            if contestant.admin is not None:
                for number, request in enumerate(requests):
                    _until_known(
                        contestant.admin, self._fleet.endpoints[number % UPSTREAMS], request
                    )

    def _started_fleet(self) -> Fleet:
        endpoints = [free_address() for _ in range(self._upstreams)]
        config_file = self._directory / "upstreams.yaml"
        config_file.write_text(upstream_configuration(endpoints))
        self._run_envoy("upstreams", config_file, endpoints[0])
        workers, events = [], []
        for number in range(UPSTREAMS):
            api, published, replayed = (free_address() for _ in range(3))
            command = [sys.executable, "-m", "extproc", "worker", "--listen", api]
            command += ["--events", f"tcp://{published}", "--replay", f"tcp://{replayed}"]
            command += ["--blocks", "65536", "--max-model-len", "400000"]
            command += ["--model-dir", str(TINY_MODEL)]
            self._run(f"worker-{number}", command, f"http://{api}/health")
            workers.append(api)
            events.append((f"tcp://{published}", f"tcp://{replayed}"))
        return Fleet(endpoints, workers, events)

    def _run(self, name: str, command: Sequence[str], reached_at: str) -> Process:
        log = self._directory / f"{name}.log"
        command = [*self._prefix(name), *command]
        return self._stack.enter_context(running(command, log, reached_at))

    def _run_envoy(self, name: str, config_file: Path, reached_at: str) -> Process:
        command = [self._envoy, "-c", str(config_file), "--concurrency", "1"]
        command += ["--log-level", "error", "--disable-hot-restart"]
        return self._run(f"envoy-{name}", command, reached_at)

    def _behind_envoy(
        self, name: str, decides: Process | None, configuration: dict[str, Any] | None = None
    ) -> Contestant:
        configuration = configuration or self._fleet.configuration()
        config_file = self._write(name, configuration)
        envoy_file = config_file.with_suffix(".envoy.yaml")
        envoy_file.write_text(envoy_configuration(config_file, asks=decides is not None))
        ready = f"http://{configuration['envoy']['admin']}/ready"
        proxies = self._run_envoy(config_file.stem, envoy_file, ready)
        url = f"http://{configuration['envoy']['listen']}"
        return Contestant(url, decides, proxies)

    def _write(self, name: str, configuration: dict[str, Any]) -> Path:
        file_name = "".join(letter if letter.isalnum() else "-" for letter in name)
        config_file = self._directory / f"{file_name}.yaml"
        config_file.write_text(yaml.safe_dump(configuration))
        return config_file

    def _idle(self, name: str, server: str) -> Contestant:
        configuration = self._fleet.configuration()
        listen = configuration["extproc"]["listen"]
        command = [sys.executable, str(HERE / "extproc_idle.py"), server, listen]
        decides = self._run(f"idle-{server}", command, listen)
        return self._behind_envoy(name, decides, configuration)

    def _ours(self, name: str, listen: str | None = None, processes: int = 1) -> Contestant:
        configuration = self._fleet.configuration()
        if listen is not None:
            configuration["extproc"]["listen"] = listen
        if processes > 1:
            configuration["extproc"]["processes"] = processes
        config_file = self._write(name, configuration)
        command = [sys.executable, "-m", "extproc", "serve", "--config", str(config_file)]
        ready = f"http://{configuration['metrics']['listen']}/readyz"
        decides = self._run(f"router-{config_file.stem}", command, ready)
        behind = self._behind_envoy(name, decides, configuration)
        admin = f"http://{configuration['admin']['listen']}"
        metrics = f"http://{configuration['metrics']['listen']}/metrics"
        return Contestant(behind.url, decides, behind.proxies, admin, metrics=metrics)

    def _smg(self) -> Contestant:
        listen, metrics = free_address(), free_address()
        ip, _, port = listen.rpartition(":")
        command = [found_smg(), "launch", "--host", ip, "--port", port]
        command += ["--worker-urls", *(f"http://{one}" for one in self._fleet.endpoints)]
        command += ["--policy", "cache_aware", "--worker-startup-check-interval", "1"]
        command += ["--log-level", "error", "--prometheus-host", ip]
        command += ["--prometheus-port", metrics.rpartition(":")[2]]
        decides = self._run("smg", command, f"http://{listen}/readiness")
        return Contestant(f"http://{listen}", decides, None)


def post(url: str, path: str, body: object) -> Any:
    """Sends a request, returns the JSON answer; the mark is an ordinary word."""
    request = urllib.request.Request(
        f"{url}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def _until_known(admin: str, holder: str, request: dict[str, Any]) -> None:
    envelope = {"path": "/v1/chat/completions", "headers": {}, "body": request}
    assert MARK in json.dumps(request)
    deadline = time.monotonic() + LEARN_SECONDS
    while True:
        told = post(admin, "/explain", envelope)
        held = {one["endpoint"]: one["overlap_tokens"] for one in told["candidates"]}
        # all except the question and the tokens that the engine always computes
        if held[holder] >= (told["prompt_tokens"] - 64) // 2 > 0:
            return
        if time.monotonic() > deadline:
            raise CannotRunError(f"a router does not hear of its workers' blocks: {told}")
        time.sleep(0.05)
