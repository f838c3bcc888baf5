"""Tries how long balancers in front wait for a silent server, and prints a table.

    python -m tests.clients.balancer_patience [--seconds 400]

For maintainers. Runs Envoy, and of nginx, HAProxy, Caddy and Traefik those that are on PATH, each
with its defaults in front of a server that is silent for so many seconds, and of one that refuses
as the router does: 429 with `Retry-After`. All of them at once.
"""

import argparse
import asyncio
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import aiohttp

from tests.clients.reluctant_model import reluctant
from tests.clients.scripted_model import CHAT
from tests.ports import free_port
from tests.system.envoy_process import ENVOY
from tests.waiting import until

QUESTION = {"model": "m", "messages": [{"role": "user", "content": "Is it done?"}]}


class Setting(NamedTuple):
    """A configuration, and the words that start the program with it in a folder."""

    file: str
    text: str
    words: Sequence[str]


class Balancer(NamedTuple):
    """A balancer. program: its name or path. setting: for its own port and the server's."""

    name: str
    program: str
    setting: Callable[[int, int], Setting]
    version: Sequence[str] = ("-v",)


class Answer(NamedTuple):
    """status: 0 if the connection was cut."""

    status: int
    seconds: float
    retry_after: str


def _nginx(port: int, server: int) -> Setting:
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    text = f"""daemon off;
pid nginx.pid;
events {{}}
http {{
  access_log off;
  {" ".join(f"{kind}_temp_path {kind};" for kind in kinds)}
  server {{
    listen 127.0.0.1:{port};
    location / {{ proxy_pass http://127.0.0.1:{server}; }}
  }}
}}
"""
    return Setting("nginx.conf", text, ["-p", ".", "-c", "nginx.conf", "-e", "error.log"])


def _haproxy_with(timeouts: str) -> Callable[[int, int], Setting]:
    def setting(port: int, server: int) -> Setting:
        text = f"""defaults
  mode http
{timeouts}
listen all
  bind 127.0.0.1:{port}
  server one 127.0.0.1:{server}
"""
        return Setting("haproxy.cfg", text, ["-db", "-f", "haproxy.cfg"])

    return setting


# What the packages of Debian and Ubuntu install in /etc/haproxy/haproxy.cfg.
_DEBIAN = "  timeout connect 5000\n  timeout client 50000\n  timeout server 50000"


def _caddy(port: int, server: int) -> Setting:
    text = f"""{{
  admin off
  persist_config off
}}
http://127.0.0.1:{port} {{
  reverse_proxy 127.0.0.1:{server}
}}
"""
    return Setting("Caddyfile", text, ["run", "--config", "Caddyfile", "--adapter", "caddyfile"])


def _traefik(port: int, server: int) -> Setting:
    pool = {"loadBalancer": {"servers": [{"url": f"http://127.0.0.1:{server}"}]}}
    router = {"rule": "PathPrefix(`/`)", "service": "one"}
    tree = {"http": {"services": {"one": pool}, "routers": {"all": router}}}
    words = [
        f"--entryPoints.web.address=127.0.0.1:{port}",
        "--providers.file.filename=dynamic.yml",
        "--global.checkNewVersion=false",
        "--global.sendAnonymousUsage=false",
    ]
    return Setting("dynamic.yml", json.dumps(tree), words)


_EXTENSIONS = "type.googleapis.com/envoy.extensions.filters"


def _envoy_with(**route: str) -> Callable[[int, int], Setting]:
    def setting(port: int, server: int) -> Setting:
        all_of_it = {"match": {"prefix": "/"}, "route": {"cluster": "one", **route}}
        host = {"name": "all", "domains": ["*"], "routes": [all_of_it]}
        router = {"@type": f"{_EXTENSIONS}.http.router.v3.Router"}
        kind = "http_connection_manager.v3.HttpConnectionManager"
        manager = {
            "@type": f"{_EXTENSIONS}.network.{kind}",
            "stat_prefix": "all",
            "route_config": {"virtual_hosts": [host]},
            "http_filters": [{"name": "router", "typed_config": router}],
        }
        members = [{"lb_endpoints": [{"endpoint": {"address": _address(server)}}]}]
        cluster = {
            "name": "one",
            "type": "STATIC",
            "load_assignment": {"cluster_name": "one", "endpoints": members},
        }
        chain = {"filters": [{"name": "manager", "typed_config": manager}]}
        listener = {"name": "all", "address": _address(port), "filter_chains": [chain]}
        tree = {"static_resources": {"listeners": [listener], "clusters": [cluster]}}
        words = ["-c", "envoy.json", "--concurrency", "1", "--disable-hot-restart"]
        return Setting("envoy.json", json.dumps(tree), words)

    return setting


def _address(port: int) -> dict[str, object]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


BALANCERS = (
    Balancer("nginx", "nginx", _nginx),
    Balancer("HAProxy", "haproxy", _haproxy_with("")),
    Balancer("HAProxy as in Debian", "haproxy", _haproxy_with(_DEBIAN)),
    Balancer("Caddy", "caddy", _caddy, ("version",)),
    Balancer("Traefik", "traefik", _traefik, ("version",)),
    Balancer("Envoy", str(ENVOY), _envoy_with(), ("--version",)),
    Balancer("Envoy, timeout: 0s", str(ENVOY), _envoy_with(timeout="0s"), ("--version",)),
)


def _version(one: Balancer) -> str:
    done = subprocess.run([one.program, *one.version], check=False, capture_output=True, text=True)
    found = re.search(r"\d+\.\d+\.\d+", done.stdout + done.stderr)
    return found[0] if found else "?"


async def _asked(port: int) -> Answer:
    """Asks once, and waits for as long as the balancer does."""
    began = time.monotonic()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        try:
            async with session.post(f"http://127.0.0.1:{port}{CHAT}", json=QUESTION) as response:
                await response.read()
                told = response.headers.get("retry-after", "")
                return Answer(response.status, time.monotonic() - began, told)
        except aiohttp.ClientConnectionError:
            return Answer(0, time.monotonic() - began, "")


async def _listens(port: int) -> bool:
    with contextlib.suppress(OSError):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()
        return True
    return False


async def tried(one: Balancer, silent_seconds: float, refusals: float) -> Answer:
    """What a client gets through a balancer, whose server is silent or refuses."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="kvsteer-balancer-") as folder:
        async with reluctant(silent_seconds, refusals) as model:
            setting = one.setting(port, model.port)
            (Path(folder) / setting.file).write_text(setting.text)
            with (Path(folder) / "log").open("wb") as log:
                process = await asyncio.create_subprocess_exec(
                    one.program, *setting.words, cwd=folder, stdin=DEVNULL, stdout=log, stderr=log
                )
            try:
                await until(lambda: _listens(port), f"{one.name} listens", pause=0.1)
                return await _asked(port)
            except AssertionError as error:
                error.add_note((Path(folder) / "log").read_text())
                raise
            finally:
                process.terminate()
                await process.wait()


async def _row(one: Balancer, silent_seconds: float) -> str:
    if shutil.which(one.program) is None:
        return f"{one.name:<22}is not on PATH"
    refused = await tried(one, 0.0, 1)
    silent = await tried(one, silent_seconds, 0)
    return (
        f"{one.name:<22}{_version(one):<9}{silent.status} after {silent.seconds:.1f} s; "
        f"429 comes as {refused.status} with Retry-After: {refused.retry_after}"
    )


async def run(silent_seconds: float) -> None:
    """Tries all at once and prints a row for each."""
    for row in await asyncio.gather(*(_row(one, silent_seconds) for one in BALANCERS)):
        sys.stdout.write(f"{row}\n")


def main(arguments: Sequence[str]) -> int:
    """Tries the balancers."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.balancer_patience")
    parser.add_argument(
        "--seconds", type=float, default=400.0, help="how long the server is silent"
    )
    asyncio.run(run(parser.parse_args(arguments).seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
