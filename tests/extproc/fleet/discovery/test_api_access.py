"""Credentials of a kubeconfig that expire, and an API server that then refuses them."""

import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from extproc.fleet.discovery import api_access
from tests.extproc.fleet.discovery.api_server import ApiServer, api_server, pod
from tests.extproc.fleet.discovery.following import following
from tests.extproc.fleet.discovery.test_kubernetes import pods, pool
from tests.waiting import until

# Prints the n-th token on the n-th run; of the first token also when it expires.
SCRIPT = """
import json, pathlib, sys
count = pathlib.Path(sys.argv[1])
number = int(count.read_text()) + 1
count.write_text(str(number))
status = {{"token": f"token-{{number}}", **({of_first} if number == 1 else {{}})}}
print(json.dumps({{
    "apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status,
}}))
"""


# Ends when its file is replaced.
HANGING = """
import pathlib, sys, time
count, script = pathlib.Path(sys.argv[1]), pathlib.Path(__file__)
count.write_text(str(int(count.read_text()) + 1))
own = script.read_text()
while script.exists() and script.read_text() == own:
    time.sleep(0.01)
raise SystemExit("given up")
"""


class Command:
    """The command of a kubeconfig's user, which returns another token each time it runs."""

    def __init__(self, folder: Path) -> None:
        self._script, self._count = folder / "login.py", folder / "count"
        self._count.write_text("0")
        self.gives()

    def gives(self, **of_first: Any) -> None:
        self._script.write_text(SCRIPT.format(of_first=json.dumps(of_first)))

    def fails(self) -> None:
        self._script.write_text("raise SystemExit('log in again')")

    def hangs(self) -> None:
        """Hangs until the script is replaced."""
        self._script.write_text(HANGING)

    @property
    def user(self) -> dict[str, Any]:
        return {
            "exec": {
                "apiVersion": "client.authentication.k8s.io/v1",
                "command": sys.executable,
                "args": [str(self._script), str(self._count)],
                "interactiveMode": "Never",
            }
        }

    @property
    def runs(self) -> int:
        return int(self._count.read_text())


def expiring(seconds: float) -> dict[str, str]:
    at = datetime.now(UTC) + timedelta(seconds=seconds)
    return {"expirationTimestamp": at.strftime("%Y-%m-%dT%H:%M:%SZ")}


async def watch_anew(api: ApiServer) -> None:
    """Ends the watch, and waits for the next one."""
    asked = len(api.asked)
    api.end_watches()
    await until(lambda: len(api.asked) > asked and api.watches == 1)


async def test_refused_token_is_renewed(tmp_path: Path) -> None:
    command = Command(tmp_path)
    async with api_server(tmp_path, command.user) as (api, kubeconfig):
        api.lets_in = "token-1"
        api.put("pods", pod("one"))
        async with following(pods(kubeconfig)) as seen:
            await until(lambda: api.watches == 1)
            await watch_anew(api)
            assert command.runs == 1
            api.lets_in = "token-2"
            await watch_anew(api)
            api.put("pods", pod("two", "10.0.0.2"))
            await until(lambda: len(seen.endpoints or ()) == 2)
        assert (command.runs, api.unauthorized, seen.faults) == (2, 1, [])


@pytest.mark.parametrize(
    ("seconds", "token", "runs"),
    [(api_access.EARLY.total_seconds() - 5, "token-2", 2), (3600, "token-1", 1)],
)
async def test_token_is_renewed_only_before_its_end(
    tmp_path: Path, seconds: float, token: str, runs: int
) -> None:
    command = Command(tmp_path)
    command.gives(**expiring(seconds))
    async with api_server(tmp_path, command.user) as (api, kubeconfig):
        api.lets_in = token
        async with following(pods(kubeconfig)) as seen:
            await until(lambda: api.watches == 1)
            await watch_anew(api)
            await watch_anew(api)
        assert (command.runs, api.unauthorized, seen.faults) == (runs, 0, [])


async def test_refusal_of_pods_and_pool_together_renews_one_token(tmp_path: Path) -> None:
    command = Command(tmp_path)
    async with api_server(tmp_path, command.user) as (api, kubeconfig):
        api.lets_in = "token-1"
        api.put("pods", pod("one"))
        api.put("pools", pool())
        async with following(pods(kubeconfig, "inference_pool: llm")) as seen:
            await until(lambda: api.watches == 2)
            api.lets_in = "token-2"
            api.end_watches()
            await until(lambda: api.unauthorized > 0 and api.watches == 2)
        assert (command.runs, seen.faults) == (2, [])


async def test_failing_token_command_is_a_fault_until_it_succeeds(tmp_path: Path) -> None:
    command = Command(tmp_path)
    async with api_server(tmp_path, command.user) as (api, kubeconfig):
        api.lets_in = "token-1"
        api.put("pods", pod("one"))
        async with following(pods(kubeconfig)) as seen:
            await until(lambda: api.watches == 1)
            command.fails()
            api.lets_in = "token-2"
            api.end_watches()
            await until(lambda: "log in again" in seen.fault)
            assert seen.endpoints == ["10.0.0.1:8000"]
            command.gives()
            await until(lambda: not seen.fault and api.watches == 1)


async def test_hanging_token_command_runs_once(tmp_path: Path) -> None:
    command = Command(tmp_path)
    async with api_server(tmp_path, command.user) as (api, kubeconfig):
        api.lets_in = "token-1"
        source = pods(kubeconfig)
        async with following(source) as seen:
            await until(lambda: api.watches == 1)
            command.hangs()
            source.access.command_seconds = 0.05
            api.lets_in = "token-3"
            api.end_watches()
            await until(lambda: len(seen.faults) > 5)
            assert seen.fault.endswith("its command takes longer than 0.05 s")
            command.gives()
            await until(lambda: not seen.fault and api.watches == 1)
        assert command.runs == 3


async def test_token_file_is_read_again_after_a_refusal(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    async with api_server(tmp_path, {"tokenFile": str(file)}) as (api, kubeconfig):
        api.lets_in = "old"
        async with following(pods(kubeconfig)) as seen:
            await until(lambda: api.watches == 1)
            file.write_text("new")
            api.lets_in = "new"
            await watch_anew(api)
        assert (api.unauthorized, seen.faults) == (1, [])


async def test_refusal_of_every_token_is_a_fault(tmp_path: Path) -> None:
    command = Command(tmp_path)
    async with api_server(tmp_path, command.user) as (api, kubeconfig):
        async with following(pods(kubeconfig)) as seen:
            await until(lambda: seen.fault == "the API server: 401")
            before = api.unauthorized
            await until(lambda: api.unauthorized >= before + 4)
        assert command.runs >= 2
