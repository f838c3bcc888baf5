"""What the demo runs: the router's configuration, the workers that go with it, and their ports."""

import fcntl
import os
import random
import socket
import sys
import tempfile
from pathlib import Path
from typing import Self

import yaml

from extproc.config import Worker, WorkerEvents
from extproc.errors import StartError
from simulator.settings import TINY_MODEL

MODEL = "tiny"

# So that a worker that is killed is shown as down, and not as one whose feed alone is gone.
PROBE_INTERVAL_MS = 2000

KVSTEER = [sys.executable, "-m", "extproc"]


# Below those that systems give to outgoing connections, which come and go meanwhile.
_PORTS = range(20_000, 32_768)


class Ports:
    """Loopback ports for one demo, until the block ends.

    Nobody listens on them yet, and the parts take seconds until they do. Meanwhile no other demo of
    this user takes them: each is a lock on one byte of a file.
    """

    def __enter__(self) -> Self:
        name = Path(tempfile.gettempdir()) / f"kvsteer-ports-{os.getuid()}"
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._locks = os.open(name, flags, 0o600)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._locks)

    def take(self, port: int) -> None:
        """Takes this port.

        Raises:
            StartError: somebody has it. Envoys would share it without a word.
        """
        reason = self._fault(port)
        if reason:
            raise StartError(
                f"demo: cannot listen on 127.0.0.1:{port}: {reason}; --port takes another"
            )

    def free(self, usual: int) -> int:
        """Takes the usual port, or another where somebody has that."""
        for port in (usual, *random.sample(_PORTS, len(_PORTS))):
            if not self._fault(port):
                return port
        raise StartError("demo: no port is free")

    def any(self) -> int:
        """Takes any port that is free."""
        return self.free(random.choice(_PORTS))  # noqa: S311 - no secret

    def _fault(self, port: int) -> str:
        """Why a port cannot be had, "" if it is ours now."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed ones do no harm
            try:
                fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
                probe.bind(("127.0.0.1", port))
            except BlockingIOError:
                return "another demo has it"
            except OSError as error:
                return error.strerror or str(error)
        return ""


def configuration(workers: int, port: int, ports: Ports) -> str:
    """The YAML of a router with so many workers.

    Raises:
        StartError: somebody has Envoy's port.
    """
    ports.take(port)
    # the usual ones where they are free, so that `kvsteer explain` needs no --admin
    admin, metrics, extproc, envoy_admin = map(ports.free, (9090, 9091, 9002, 9901))
    of_workers = [tuple(ports.any() for _ in range(3)) for _ in range(workers)]
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
                for api, events, replay in of_workers
            ],
        }
    )


def worker_command(worker: Worker) -> list[str]:
    """What starts a simulated worker as the configuration has it."""
    command = [*KVSTEER, "worker", "--listen", worker.endpoint, "--model", MODEL]
    if isinstance(worker.events, WorkerEvents):
        command += ["--events", worker.events.zmq or "", "--replay", worker.events.replay or ""]
    speed = ["--prefill-tokens-per-second", "8000", "--decode-tokens-per-second", "200"]
    return [*command, *speed, "--misbehave"]
