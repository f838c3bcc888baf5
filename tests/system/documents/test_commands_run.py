"""The commands of the documentation, run as they are written, against a simulated fleet."""

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import yaml

from tests.documented import PAGES, ROOT, commands_of
from tests.ports import free_port, free_ports_apart
from tests.system.envoy_process import ENVOY
from tests.system.ingresses.existing_envoy import plain_envoy
from tests.system.system import System, chat, long_text, running
from tests.waiting import until

# What begins like this cannot be run here, and why.
NOT_RUN = {
    "apt-get": "installs packages of the system",
    "docker compose up": "needs Docker: tests/docker/test_compose.py does the same",
    "docker run": "needs Docker",
    "export": "variables for a client: tests/clients/test_page_of_agents.py compares them",
    "helm": "needs a cluster: tests/deploy render the chart",
    "kubectl": "needs a cluster: tests/deploy check what is applied",
    "kvsteer whatif conversation_trace.jsonl": "needs Mooncake's trace, which is not shipped",
    "kvsteer whatif synthetic_trace.jsonl": "needs Mooncake's trace, which is not shipped",
    "make": "runs the tests, or installs what they need",
    "pip": "needs a package index; tests/test_packaging.py installs the wheel",
    "pytest": "runs the tests",
    "python -m sglang": "needs SGLang",
    "python -m tests.clients": "installs agents: `make clients` runs some of them",
    "python3 -m venv": "makes an environment, as the Makefile does",
    "python benchmarks": "takes minutes: tests/test_benchmarks.py runs each with --smoke",
    "qwen": "a client of its own: tests/clients run it",
    "sudo": "changes the system: tests/deploy/test_systemd.py checks the unit",
    "vllm": "needs vLLM: tests/engines start it so",
    "MODEL_DIR=": "needs GPUs",
    "KVSTEER_": "runs tests, or builds a wheel: tests/test_packaging.py does",
    "VLLM_": "needs vLLM",
}

# What names a command without what it needs, or with a placeholder that nothing here can replace.
NAMES = {
    "kvsteer bridge": "needs an engine's endpoint: a block has it",
    "kvsteer completion": "needs a shell",
    "kvsteer decision": "a span in traces",
    "kvsteer demo": "takes a minute: tests/kvtools/demo/test_demo.py runs it",
    "kvsteer demo --check": "takes a minute: tests/kvtools/demo/test_demo.py runs it",
    "kvsteer envoy --patch": "needs a file: a block has it",
    "kvsteer explain": "needs a request: a block has it",
    "kvsteer explain --request-id": "needs an id: a block has it",
    "kvsteer health --at HOST:PORT --ca FILE": "needs TLS: tests/extproc/serving/test_tls.py",
    "kvsteer traffic": "takes a minute: a block has it with fewer seconds",
    "kvsteer whatif": "needs a recording: a block has it",
    "kvsteer whatif TRACE --tenants": "needs tenants: tests/kvtools/whatif",
    "kvsteer worker": "runs until it is ended: every system test starts one",
}

# Those that run until they are ended, and what they print or serve when they are ready.
UNTIL_ENDED = ("serve", "bridge")

SECONDS = 120.0


def shown() -> list[tuple[str, str]]:
    """The commands of all pages with the pages' names, each once."""
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]
    found = {command: page.name for page in pages for command in commands_of(page)}
    return [(page, command) for command, page in found.items()]


def _is_run(command: str) -> bool:
    return command not in NAMES and not command.startswith(tuple(NOT_RUN))


RUN = [(page, command) for page, command in shown() if _is_run(command)]


def test_reasons_for_not_running_each_concern_a_command() -> None:
    commands = [command for _, command in shown()]
    unused = [start for start in NOT_RUN if not any(one.startswith(start) for one in commands)]
    assert not unused
    assert set(commands) >= NAMES.keys()
    assert len(RUN) > 50


class Reader:
    """Somebody who copies commands from the documentation, with addresses of their own."""

    def __init__(self, system: System, directory: Path) -> None:
        self.system = system
        self.directory = directory
        self._environment = os.environ | {"PATH": f"{directory / 'bin'}:{os.environ['PATH']}"}

    async def run(self, command: str) -> tuple[int, str]:
        """Runs a command; returns its status and output. Ends it once it is ready if it serves."""
        text = await self._adapted(command)
        place = self.directory / ("other" if self._serves(text) else "")
        process = await asyncio.create_subprocess_shell(
            text,
            cwd=place,
            env=self._environment,
            executable="/bin/bash",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            if self._serves(text):
                return await self._end_when_ready(process)
            output, _ = await asyncio.wait_for(process.communicate(), SECONDS)
            return process.returncode or 0, output.decode()
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)

    def _serves(self, text: str) -> bool:
        return bool(re.search(rf"\bkvsteer ({'|'.join(UNTIL_ENDED)})\b(?! --help)", text))

    async def _end_when_ready(self, process: asyncio.subprocess.Process) -> tuple[int, str]:
        assert process.stdout is not None
        printed = ""
        while not re.search(r"serving |ready", printed):
            line = await asyncio.wait_for(process.stdout.readline(), SECONDS)
            assert line, printed
            printed += line.decode()
        os.killpg(process.pid, signal.SIGTERM)
        rest, _ = await asyncio.wait_for(process.communicate(), SECONDS)
        return process.returncode or 0, printed + rest.decode()

    async def _adapted(self, command: str) -> str:
        """The command with the addresses and files that are here, and shorter where it waits."""
        text = re.sub(r"^docker (compose )?exec (-\w+ )?kvsteer ", "", command)
        for there, here in self._places().items():
            text = text.replace(there, here)
        if "--request-id ID" in text:
            text = text.replace("ID", await self._request_id(), 1)
        if "REQUEST" in text:
            text = text.replace("REQUEST", await self._judged())
        text = text.replace("CONVERSATION", "1")
        text = re.sub(r"--seconds \d+", "--seconds 5", text)
        text = re.sub(r"\bcurl ", "curl --fail-with-body -s ", text)
        if text == "kvsteer health":
            config = yaml.safe_load(self.system.config_file.read_text())
            text += f" --at {config['extproc']['listen']}"
        return re.sub(
            r"\bkvsteer (top|explain|report|why)\b",
            rf"kvsteer \1 --admin {self.system.admin}",
            text,
        )

    def _places(self) -> Mapping[str, str]:
        system = self.system
        first, second = (worker.endpoint for worker in system.workers)
        events, replay = system.workers[0].events_endpoint, system.workers[0].replay_endpoint
        assert events is not None
        assert replay is not None
        return {
            "http://127.0.0.1:10000": system.envoy,
            "http://envoy:10000": system.envoy,
            "http://127.0.0.1:9090": system.admin,
            "http://127.0.0.1:9091": system.metrics,
            "http://127.0.0.1:9092": f"http://{self._probe()}",
            "127.0.0.1:9090": system.admin,
            "localhost:9090": system.admin,
            "envoy:9901": system.envoy_admin.removeprefix("http://"),
            "http://WORKER": f"http://{first}",
            "10.0.0.1:8000": first,
            "10.0.0.2:8000": second,
            "tcp://127.0.0.1:5557": events,
            "tcp://127.0.0.1:5558": replay,
            "0.0.0.0:50051": "127.0.0.1:0",
            "http://collector:4318": "http://127.0.0.1:1",
            "/etc/kvsteer/kvsteer.yaml": "kvsteer.yaml",
            "/var/lib/kvsteer/": "",
            "FILE": "kvsteer.yaml",
            "--processes N": "--processes 2",
            "x-tenant:NAME": "x-tenant:red",
        }

    async def _request_id(self) -> str:
        await self.system.send(chat(long_text("asked about")))
        async with self.system.session.get(f"{self.system.admin}/decisions") as response:
            found: str = (await response.json())["decisions"][-1]["request_id"]
            return found

    async def _judged(self) -> str:
        """The id of a request whose prompt was judged."""
        name = await self._request_id()

        async def is_judged() -> bool:
            url = f"{self.system.admin}/misses?request_id={name}"
            async with self.system.session.get(url) as response:
                return bool((await response.json())["turns"])

        await until(is_judged, "the request is judged")
        return name

    def _probe(self) -> str:
        config = yaml.safe_load(self.system.config_file.read_text())
        return str(config["probe"]["listen"])

    async def heal(self) -> None:
        """Takes back what a command may have changed."""
        admin, session = self.system.admin, self.system.session
        endpoints = [worker.endpoint for worker in self.system.workers]
        back: list[tuple[str, dict[str, Any]]] = [
            (f"{admin}/steering", {"percent": 100}),
            (f"{admin}/events", {"enabled": True}),
        ]
        back += [(f"{admin}/draining", {"endpoint": one, "draining": False}) for one in endpoints]
        for one in endpoints:
            back.append((f"http://{one}/misbehave", {"hide_events": False, "hide_replay": None}))
        for url, body in back:
            async with session.post(url, json=body) as response:
                assert response.status < 300, url


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reader(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Reader]:
    if shutil.which("curl") is None:
        pytest.skip("curl is missing")
    directory = tmp_path_factory.mktemp("reader")
    changes = {
        "accounting": {"responses": "usage"},
        "recorder": {"file": str(directory / "trace.jsonl")},
        "misses": {"enabled": True},
        "probe": {
            "token_file": str(directory / "probe-token"),
            "listen": f"127.0.0.1:{free_ports_apart(2)}",
        },
    }
    (directory / "probe-token").write_text("no-token-but-of-its-length")
    async with running(workers=2, changes=changes, misbehave=True) as system:
        _furnish(directory, system)
        for seed in ("alpha", "beta", "gamma"):
            for _ in range(3):
                await system.send(chat(long_text(seed)))
        trace = directory / "trace.jsonl"
        await until(lambda: _has_lines(trace), "requests are recorded")
        reader = Reader(system, directory)
        patched, said = await reader.run("kvsteer envoy --patch envoy.yaml > envoy-kvsteer.yaml")
        assert patched == 0, said
        yield reader


async def _has_lines(trace: Path) -> bool:
    return trace.exists() and trace.stat().st_size > 0


def _furnish(directory: Path, system: System) -> None:
    """Puts the files there that the commands read, and the programs that they name."""
    config = yaml.safe_load(system.config_file.read_text())
    (directory / "kvsteer.yaml").write_text(yaml.safe_dump(config))
    (directory / "other").mkdir()
    own = {
        name: {**config.get(name, {}), "listen": f"127.0.0.1:{free_port()}"}
        for name in ("extproc", "admin", "metrics", "probe")
    }
    own |= {"recorder": {}, "state": {"file": str(directory / "other" / "state")}}
    (directory / "other" / "kvsteer.yaml").write_text(yaml.safe_dump(config | own))
    endpoints = [worker.endpoint for worker in system.workers]
    envoy = plain_envoy(free_port(), free_port(), endpoints)
    (directory / "envoy.yaml").write_text(yaml.safe_dump(envoy))
    (directory / "request.json").write_text(json.dumps(chat(long_text("alpha"))))
    (directory / "bin").mkdir()
    (directory / "bin" / "envoy").symlink_to(ENVOY)
    (directory / "bin" / "kvsteer").write_text(
        f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m extproc "$@"\n'
    )
    (directory / "bin" / "kvsteer").chmod(0o755)


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("page", "command"), RUN, ids=[f"{page}-{number}" for number, (page, _) in enumerate(RUN)]
)
async def test_documented_command_succeeds(reader: Reader, page: str, command: str) -> None:
    program = command.split(maxsplit=1)[0]
    if program == "openssl" and shutil.which(program) is None:
        pytest.skip(f"{program} is missing")
    status, printed = await reader.run(command)
    await reader.heal()
    assert status == 0, f"{page}: {command}\n{printed}"
