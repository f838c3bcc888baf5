"""Two router processes behind one Envoy, as `kvsteer envoy` configures it."""

import itertools
import os
import re
import signal

import pytest

from extproc.base import address
from tests.ports import free_ports_apart
from tests.system.system import System, chat, long_text, running
from tests.waiting import until


def pids(system: System, number: int) -> list[int]:
    said = system.log.read_text()
    return [int(pid) for pid in re.findall(rf"process {number} of 2 runs with pid (\d+)", said)]


async def decisions(system: System) -> list[float]:
    """How many requests each process has decided; raises OSError where one does not listen."""
    placed = []
    for number in range(2):
        url = f"http://{address.nth(system.metrics.removeprefix('http://'), number)}/metrics"
        async with system.session.get(url) as response:
            text = await response.text()
        found = re.findall(r"^kvsteer_decisions_total\{.*\} (\S+)$", text, re.MULTILINE)
        placed.append(sum(map(float, found)))
    return placed


@pytest.mark.slow
async def test_requests_are_answered_while_one_of_two_processes_restarts() -> None:
    ports = [f"127.0.0.1:{free_ports_apart(2)}" for _ in range(3)]
    names = ("extproc", "admin", "metrics")
    changes = {name: {"listen": listen} for name, listen in zip(names, ports, strict=True)}
    changes["extproc"]["processes"] = 2  # type: ignore[assignment]
    async with running(workers=2, changes=changes) as system:

        async def all_ready() -> bool:  # the first process answers for both
            async with system.session.get(f"{system.metrics}/readyz") as response:
                return response.status == 200

        await until(all_ready, "both are ready")
        numbers = itertools.count()

        async def take_turns() -> bool:
            assert (await system.send(chat(long_text(f"before {next(numbers)}"))))[0] == 200
            return min(await decisions(system)) >= 5

        await until(take_turns, "Envoy has seen that both are ready, and takes turns")

        os.kill(pids(system, 1)[0], signal.SIGKILL)

        async def is_back() -> bool:
            assert (await system.send(chat("meanwhile")))[0] == 200
            return len(pids(system, 1)) == 2

        await until(is_back, "the process is started anew")

        async def takes_part() -> bool:
            assert (await system.send(chat("after")))[0] == 200
            try:
                return min(await decisions(system)) >= 5
            except OSError:  # it does not listen yet
                return False

        await until(takes_part, "Envoy sends it requests again")
