"""Ports are given to one process at a time, also while nobody listens on them."""

import subprocess
import sys

from tests.ports import free_port

_ASK = "from tests import ports; import sys; print(ports._is_ours(int(sys.argv[1])))"


def _said_by_another_process(program: str, *arguments: str) -> str:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _another_process_may_have(port: int) -> bool:
    return _said_by_another_process(_ASK, str(port)) == "True"


def test_port_is_given_to_one_process_at_a_time() -> None:
    ports = [free_port() for _ in range(20)]
    assert len(set(ports)) == 20
    assert not any(map(_another_process_may_have, ports[::10]))


def test_port_of_a_process_that_ended_can_be_given_out_again() -> None:
    taken = "from tests import ports; print(ports.free_port())"
    ended = subprocess.run(
        [sys.executable, "-c", taken], capture_output=True, text=True, check=True
    )
    assert _another_process_may_have(int(ended.stdout))
