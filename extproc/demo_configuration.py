"""What the demo runs: the router's configuration, and the workers that go with it."""

import contextlib
import socket
import sys
from collections.abc import Sequence

import yaml

from extproc.config import Worker, WorkerEvents
from simulator.settings import TINY_MODEL

MODEL = "tiny"

# So that a worker that is killed is shown as down, and not as one whose feed alone is gone.
PROBE_INTERVAL_MS = 2000

KVSTEER = [sys.executable, "-m", "extproc"]


def configuration(workers: int, port: int) -> str:
    """The YAML of a router with so many workers, on ports that are free, but for Envoy's."""
    # the usual ports where they are free, so that `kvsteer explain` needs no --admin
    admin, metrics, extproc, envoy_admin, *ports = _free_ports(
        [9090, 9091, 9002, 9901] + [0] * 3 * workers
    )
    return yaml.safe_dump(
        {
            "extproc": {"listen": f"127.0.0.1:{extproc}"},
            "admin": {"listen": f"127.0.0.1:{admin}"},
            "metrics": {"listen": f"127.0.0.1:{metrics}"},
            "envoy": {"listen": f"127.0.0.1:{port}", "admin": f"127.0.0.1:{envoy_admin}"},
            "log": {"level": "debug"},
            "policy": {"probe_interval_ms": PROBE_INTERVAL_MS},
            "models": [{"name": MODEL, "tokenizer": str(TINY_MODEL)}],
            "workers": [
                {
                    "endpoint": f"127.0.0.1:{api}",
                    "events": {
                        "zmq": f"tcp://127.0.0.1:{events}",
                        "replay": f"tcp://127.0.0.1:{replay}",
                    },
                }
                for api, events, replay in zip(ports[::3], ports[1::3], ports[2::3], strict=True)
            ],
        }
    )


def _free_ports(wanted: Sequence[int]) -> list[int]:
    """The wanted ports, or others where those are taken; 0 wants any that is free."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in wanted]
        for one, port in zip(held, wanted, strict=True):
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]


def worker_command(worker: Worker) -> list[str]:
    """What starts a simulated worker as the configuration has it."""
    command = [*KVSTEER, "worker", "--listen", worker.endpoint, "--model", MODEL]
    if isinstance(worker.events, WorkerEvents):
        command += ["--events", worker.events.zmq or "", "--replay", worker.events.replay or ""]
    speed = ["--prefill-tokens-per-second", "8000", "--decode-tokens-per-second", "200"]
    return [*command, *speed, "--misbehave"]
