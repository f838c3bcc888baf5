"""A user's existing Envoy, and the steps of docs/start.md for it."""

import contextlib
import re
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from kvtools.simulator.settings import TINY_MODEL, Settings
from kvtools.simulator.worker import SimulatedWorker
from tests.ports import free_port
from tests.system.configuration import ENVOY_WAITS, patient
from tests.system.envoy_process import running_envoy
from tests.system.system import System, started

ROOT = Path(__file__).parents[3]

Tree = dict[str, Any]


def plain_envoy(port: int, admin_port: int, engines: list[str]) -> Tree:
    """An envoy.yaml without a router: one route, one cluster, round robin.

    engines: host:port of each.
    """
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network"
        ".http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "ingress",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "llm",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "engines"}}],
                }
            ]
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
                },
            }
        ],
    }
    http = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    listener = {"address": address("127.0.0.1", port), "filter_chains": [{"filters": [http]}]}
    cluster = {
        "name": "engines",
        "type": "STATIC",
        "lb_policy": "ROUND_ROBIN",
        "load_assignment": load_assignment("engines", engines),
    }
    return {
        "admin": {"address": address("127.0.0.1", admin_port)},
        "static_resources": {"listeners": [listener], "clusters": [cluster]},
    }


def address(host: str, port: int) -> Tree:
    return {"socket_address": {"address": host, "port_value": port}}


def load_assignment(name: str, members: list[str]) -> Tree:
    """The endpoints of a cluster."""
    pairs = [member.rsplit(":", 1) for member in members]
    endpoints = [{"endpoint": {"address": address(host, int(port))}} for host, port in pairs]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


def connection_manager(envoy: Tree) -> Tree:
    """The one connection manager of an envoy.yaml."""
    (listener,) = envoy["static_resources"]["listeners"]
    found: Tree = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return found


def fragments() -> list[Tree]:
    """The parts of envoy/add-to-your-envoy.yaml: manager, engines, router, host, another route."""
    text = (ROOT / "envoy/add-to-your-envoy.yaml").read_text()
    return [one for one in yaml.safe_load_all(text) if one is not None]


def add(tree: Tree, fragment: Tree) -> None:
    """Adds a fragment as it says: appends to lists, filters before the last; sets the rest."""
    for key, value in fragment.items():
        if not isinstance(value, list):
            tree[key] = value
        elif key == "http_filters":
            tree[key] = [*tree[key][:-1], *value, tree[key][-1]]
        else:
            tree[key] = [*tree.get(key, []), *value]


def documented_configuration() -> str:
    """The kvsteer.yaml that docs/start.md gives for an existing Envoy."""
    page = (ROOT / "docs" / "start.md").read_text()
    section = page.partition("## Use your own workers and Envoy")[2]
    found = re.search(r"Write `kvsteer\.yaml`.*?\n *```\w*\n(.*?)\n *```", section, re.DOTALL)
    assert found is not None
    return textwrap.dedent(found[1])


def configuration(workers: list[SimulatedWorker], envoy_port: int, admin_port: int) -> Tree:
    """That kvsteer.yaml with the addresses of these workers, on free ports."""
    text = documented_configuration().replace("/models/my-model", str(TINY_MODEL))
    for number, worker in enumerate(workers, 1):
        for there, here in (
            (f"10.0.0.{number}:8000", worker.endpoint),
            (f"tcp://10.0.0.{number}:5557", worker.events_endpoint),
            (f"tcp://10.0.0.{number}:5657", worker.replay_endpoint),
        ):
            assert there in text
            text = text.replace(there, here or "")
    ports = {name: {"listen": f"127.0.0.1:{free_port()}"} for name in ("extproc", "admin")}
    ports["metrics"] = {"listen": f"127.0.0.1:{free_port()}"}
    tree: Tree = yaml.safe_load(text)
    envoy = {"listen": f"127.0.0.1:{envoy_port}", "admin": f"127.0.0.1:{admin_port}"}
    return patient(tree | ports | {"envoy": envoy})


def _made_patient(envoy: Tree) -> None:
    """Has Envoy wait for a router on a busy machine, in place of the time that the pieces name."""
    (asking,) = [
        one["typed_config"]
        for one in connection_manager(envoy)["http_filters"]
        if one["name"] == "envoy.filters.http.ext_proc"
    ]
    assert "message_timeout" in asking
    asking["message_timeout"] = ENVOY_WAITS


@contextlib.asynccontextmanager
async def behind(
    directory: Path, change: Callable[[Tree, int], Tree | str], **settings: Any
) -> AsyncIterator[System]:
    """Two workers and an Envoy; the router is configured and not started.

    change: returns the user's envoy.yaml changed to ask the router on a port, or the text of
    another file. settings: of the workers.
    """
    async with contextlib.AsyncExitStack() as stack:
        both = [Settings(model="my-model", **settings) for _ in range(2)]
        workers, stops = await started(stack, both)
        port, admin_port = free_port(), free_port()
        tree = configuration(workers, port, admin_port)
        config_file = directory / "kvsteer.yaml"
        config_file.write_text(yaml.safe_dump(tree))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        system = System(session, config_file, workers, stops)
        plain = plain_envoy(port, admin_port, [worker.endpoint for worker in workers])
        router_port = int(tree["extproc"]["listen"].rpartition(":")[2])
        changed = change(plain, router_port)
        if not isinstance(changed, str):
            _made_patient(changed)
        text = changed if isinstance(changed, str) else yaml.safe_dump(changed)
        await stack.enter_async_context(running_envoy(text, admin_port))
        stack.push_async_callback(system.stop_router)
        yield system
