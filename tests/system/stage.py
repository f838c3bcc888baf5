"""Workers, one or two routers, Envoy as `kvsteer envoy` prints it, and the same without ext_proc.

Each is a process of its own, started with the commands that users have.
"""

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.ports import free_port
from tests.system.configuration import configuration, local_address
from tests.system.envoy_process import ENVOY
from tests.system.parts import Part

KVSTEER = [sys.executable, "-m", "extproc"]
MODEL_DIR = str(Path(__file__).parents[2] / "kvtools" / "simulator" / "tiny_model")
WORKERS = 4

# Larger bodies are placed on their headers by the router, and refused by Envoy.
MAX_BODY_BYTES = 6 * 1024 * 1024
BUFFER_LIMIT_BYTES = 8 * 1024 * 1024

# So that an answer of four tokens takes a while, in which something can fail.
DECODE_TOKENS_PER_SECOND = 50
BLOCKS = 20_000


@dataclasses.dataclass
class Place:
    """Where one router listens."""

    config_file: Path
    admin: str
    metrics: str
    extproc: str


class Stage:
    """All processes; `heal` restores those that a test has broken.

    sharing: the URL through which the two routers share, "" if they share nothing.
    """

    def __init__(self, directory: Path, sharing: str = "") -> None:
        self._sharing = sharing
        self._directory = directory
        self._ports = [[free_port() for _ in range(3)] for _ in range(WORKERS)]
        self.endpoints = [f"127.0.0.1:{api}" for api, _, _ in self._ports]
        self.workers = [self._worker(number) for number in range(WORKERS)]
        self._listen, self._admin = local_address(), local_address()
        self.places = [self._place(number) for number in range(2)]
        self.routers = [self._router(number) for number in range(2)]
        printed = self._printed()
        self.envoy = self._envoy("envoy", printed, self._listen, self._admin)
        self.url = f"http://{self._listen}"
        self.envoy_admin = f"http://{self._admin}"
        other, other_admin = local_address(), local_address()
        self.plain = self._envoy("plain", _without_router(printed), other, other_admin)
        self.plain_url = f"http://{other}"
        pair, pair_admin = local_address(), local_address()
        members = [place.extproc for place in self.places]
        self.envoy_of_two = self._envoy("of-two", _with_routers(printed, members), pair, pair_admin)
        self.url_of_two = f"http://{pair}"

    @property
    def admin(self) -> str:
        """URL of the first router's admin server."""
        return self.places[0].admin

    def heal(self) -> None:
        """Starts or continues what every test begins with, and waits until it can be reached."""
        parts = [*self.workers, self.routers[0], self.envoy, self.plain]
        for part in parts:
            if part.runs and not part.is_sound:
                part.go_on()
            if not part.runs:
                part.start()
        for part in parts:
            part.wait()

    def close(self) -> None:
        """Ends all processes."""
        for part in (self.envoy, self.plain, self.envoy_of_two, *self.routers, *self.workers):
            part.kill()

    def refusing_worker(self, number: int) -> Part:
        """A process that answers 503 to all, to be started where this worker was."""
        command = [sys.executable, str(Path(__file__).with_name("refusing_worker.py"))]
        endpoint = self.endpoints[number]
        log = self._directory / f"refusing-{number}.log"
        return Part(f"refusing worker {endpoint}", [*command, endpoint], log, endpoint)

    def _worker(self, number: int) -> Part:
        api, events, replay = self._ports[number]
        options = [
            "--listen",
            f"127.0.0.1:{api}",
            "--events",
            f"tcp://127.0.0.1:{events}",
            "--replay",
            f"tcp://127.0.0.1:{replay}",
            "--decode-tokens-per-second",
            str(DECODE_TOKENS_PER_SECOND),
            "--blocks",
            str(BLOCKS),
        ]
        log = self._directory / f"worker-{number}.log"
        health = f"http://127.0.0.1:{api}/health"
        return Part(f"worker {number}", [*KVSTEER, "worker", *options], log, health)

    def _place(self, number: int) -> Place:
        config_file = self._directory / f"router-{number}.yaml"
        sections: dict[str, Any] = {
            "extproc": {"max_body_bytes": MAX_BODY_BYTES},
            "envoy": {
                "listen": self._listen,
                "admin": self._admin,
                "request_body_buffer_limit_bytes": BUFFER_LIMIT_BYTES,
            },
            "models": [{"name": "tiny", "tokenizer": MODEL_DIR}],
            "workers": [
                {
                    "endpoint": f"127.0.0.1:{api}",
                    "events": {
                        "zmq": f"tcp://127.0.0.1:{events}",
                        "replay": f"tcp://127.0.0.1:{replay}",
                    },
                }
                for api, events, replay in self._ports
            ],
        }
        if self._sharing:
            sections["sharing"] = {"url": self._sharing, "name": f"router-{number}"}
        written = configuration(sections)
        config_file.write_text(yaml.safe_dump(written))
        extproc, admin, metrics = (
            written[one]["listen"] for one in ("extproc", "admin", "metrics")
        )
        return Place(config_file, f"http://{admin}", f"http://{metrics}", extproc)

    def _router(self, number: int) -> Part:
        place = self.places[number]
        command = [*KVSTEER, "serve", "--config", str(place.config_file)]
        log = self._directory / f"router-{number}.log"
        return Part(f"router {number}", command, log, place.extproc)

    def _printed(self) -> str:
        command = [*KVSTEER, "envoy", "--config", str(self.places[0].config_file)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def _envoy(self, name: str, printed: str, listen: str, admin: str) -> Part:
        text = printed.replace(*_port_line(self._listen, listen))
        text = text.replace(*_port_line(self._admin, admin))
        config_file = self._directory / f"{name}.yaml"
        config_file.write_text(text)
        command = [str(ENVOY), "-c", str(config_file), "--concurrency", "2"]
        command += ["--log-level", "warning", "--disable-hot-restart"]
        return Part(name, command, self._directory / f"{name}.log", f"http://{admin}/ready")


@contextmanager
def staged(directory: Path, sharing: str = "") -> Iterator[Stage]:
    """A stage, none of whose processes runs yet."""
    stage = Stage(directory, sharing)
    try:
        yield stage
    finally:
        stage.close()


def _port_line(old: str, new: str) -> tuple[str, str]:
    return tuple(f"port_value: {one.rpartition(':')[2]}\n" for one in (old, new))  # type: ignore[return-value]


def _without_router(printed: str) -> str:
    """The same Envoy, but without ext_proc."""
    tree = yaml.safe_load(printed)
    for listener in tree["static_resources"]["listeners"]:
        for chain in listener["filter_chains"]:
            manager = chain["filters"][0]["typed_config"]
            manager["http_filters"] = [
                one for one in manager["http_filters"] if "ext_proc" not in one["name"]
            ]
    return yaml.safe_dump(tree, sort_keys=False)


def _with_routers(printed: str, members: list[str]) -> str:
    """The same Envoy with these routers in its ext_proc cluster."""
    tree = yaml.safe_load(printed)
    found = next(one for one in tree["static_resources"]["clusters"] if one["name"] == "kvsteer")
    first = yaml.safe_dump(found["load_assignment"]["endpoints"][0]["lb_endpoints"][0])
    found["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
        yaml.safe_load(first.replace(*_port_line(members[0], member))) for member in members
    ]
    return yaml.safe_dump(tree, sort_keys=False)
