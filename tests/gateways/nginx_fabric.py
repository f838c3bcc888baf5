"""NGINX Gateway Fabric without its cluster: its nginx, its script and its shim for the picker.

nginx is configured as the controller of 2.6 does it for a Gateway, an HTTPRoute to an InferencePool
with FailOpen and, as far as a test asks for it, its policies.
"""

import asyncio
import contextlib
import os
import shutil
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from simulator.server import running as running_worker
from simulator.settings import TINY_MODEL, Settings
from simulator.worker import Worker
from tests.e2e.system import System, until
from tests.extproc.serving.identities import Identities
from tests.ports import free_port

OVERLAY = Path(__file__).parents[2] / "deploy/kubernetes/overlays/nginx-gateway-fabric"
RELEASE = "2.6.7"
SHIM_PORT = 54800  # of the shim, and written into the script
MODULES = (
    Path("/usr/lib/nginx/modules/ngx_http_js_module.so"),
    Path("/usr/share/nginx/modules/ngx_http_js_module.so"),
)


def missing() -> str:
    """Why it cannot run here; "" if it can."""
    given = os.environ.get("KVSTEER_NGF")
    if not given:
        return (
            "KVSTEER_NGF is not set: the folder of `gateway`, which is /usr/bin/gateway in "
            f"NGINX Gateway Fabric's image, and `epp.js`, of its nginx image ({RELEASE})"
        )
    if absent := [name for name in ("gateway", "epp.js") if not (Path(given) / name).exists()]:
        return f"KVSTEER_NGF has no {' and no '.join(absent)}"
    if shutil.which("nginx") is None or not any(one.exists() for one in MODULES):
        return "there is no nginx with njs; on Debian: apt-get install nginx libnginx-mod-http-js"
    return ""


def nginx_conf(folder: Path, port: int, router_port: int, workers: Sequence[str], more: str) -> str:
    """What the controller writes for this pool. more: directives that its policies add."""
    script = Path(os.environ["KVSTEER_NGF"]) / "epp.js"
    (folder / "epp.js").write_bytes(script.read_bytes())
    module = next(one for one in MODULES if one.exists())
    members = " ".join(f"server {worker};" for worker in workers)
    temporary = "\n".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    inner = "/_ngf-internal-proxy-pass-rule0-route0-backend0-inference"
    return f"""
load_module {module};
daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/nginx.log notice;
events {{}}
http {{
  js_import epp from {folder}/epp.js;
  access_log off;
  {temporary}
  map $http_host $gw_api_compliant_host {{ '' $host; default $http_host; }}
  map $http_upgrade $connection_keepalive {{ default upgrade; '' ''; }}
  map $inference_workload_endpoint $inference_backend_pool {{
    "" pool;
    ~.+ $inference_workload_endpoint;
    default pool;
  }}
  upstream pool {{
    random two least_conn;
    zone pool 512k;
    {members}
    keepalive 16;
  }}
  server_tokens off;
  server {{
    listen 127.0.0.1:{port};
    server_name ~^;
    {more}
    location {inner} {{
      internal;
      proxy_http_version 1.1;
      proxy_set_header Host "$gw_api_compliant_host";
      proxy_set_header X-Forwarded-For "$proxy_add_x_forwarded_for";
      proxy_set_header X-Forwarded-Proto "$scheme";
      proxy_set_header X-Forwarded-Host "$host";
      proxy_set_header X-Forwarded-Port "$server_port";
      proxy_set_header Upgrade "$http_upgrade";
      proxy_set_header Connection "$connection_keepalive";
      proxy_pass http://$inference_backend_pool$request_uri;
    }}
    location / {{
      js_var $inference_workload_endpoint;
      set $epp_internal_path {inner};
      set $epp_host 127.0.0.1;
      set $epp_port {router_port};
      js_content epp.getEndpoint;
      proxy_http_version 1.1;
    }}
  }}
}}
"""


def directives() -> str:
    """What the controller makes of the overlay's policies."""
    policies = yaml.safe_load_all((OVERLAY / "policies.yaml").read_text())
    specs = {one["kind"]: one["spec"] for one in policies}
    timeout = specs["ProxySettingsPolicy"]["timeout"]
    (snippet,) = specs["SnippetsPolicy"]["snippets"]
    assert snippet["context"] == "http.server"
    return f"""
    client_max_body_size {specs["ClientSettingsPolicy"]["body"]["maxSize"]};
    proxy_read_timeout {timeout["read"]};
    proxy_send_timeout {timeout["send"]};
    {snippet["value"]}
    """


def kvsteer_yaml(folder: Path, workers: Sequence[Worker], listen: str) -> str:
    """The overlay's configuration, with a list of workers instead of the pool."""
    identities = Identities(folder)
    tree = yaml.safe_load((OVERLAY.parents[1] / "components/router-tls/kvsteer.yaml").read_text())
    del tree["discovery"]
    tree["extproc"]["listen"] = f"127.0.0.1:{free_port()}"
    tree["extproc"]["tls"] = {
        "certificate": str(identities.certificate_file),
        "key": str(identities.key_file),
    }
    for name in ("admin", "metrics"):
        tree[name] = {"listen": f"127.0.0.1:{free_port()}"}
    tree["envoy"] = {"listen": listen, "admin": f"127.0.0.1:{free_port()}"}
    tree["models"] = [{"name": "tiny", "tokenizer": str(TINY_MODEL)}]
    tree["workers"] = [
        {
            "endpoint": worker.endpoint,
            "events": {"zmq": worker.events_endpoint, "replay": worker.replay_endpoint},
        }
        for worker in workers
    ]
    return yaml.safe_dump(tree)


@contextlib.asynccontextmanager
async def fabric(folder: Path, more: str, **settings: Any) -> AsyncIterator[System]:
    """Three workers, a router that is ready, the shim with its own defaults, and nginx.

    more: nginx directives of its policies. settings: of the workers.
    """
    async with contextlib.AsyncExitStack() as stack:
        workers: list[Worker] = []
        stops = []
        for _ in range(3):
            each = await stack.enter_async_context(contextlib.AsyncExitStack())
            worker = running_worker(Settings(**settings))
            workers.append(await each.enter_async_context(worker))
            stops.append(each.aclose)
        port = free_port()
        config_file = folder / "kvsteer.yaml"
        config_file.write_text(kvsteer_yaml(folder, workers, f"127.0.0.1:{port}"))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        system = System(session, config_file, workers)
        for started, stop in zip(workers, stops, strict=True):
            system.add_stop(started.endpoint, stop)
        stack.push_async_callback(system.end)
        router = yaml.safe_load(config_file.read_text())["extproc"]["listen"]
        router_port = int(router.rpartition(":")[2])
        shim = str(Path(os.environ["KVSTEER_NGF"]) / "gateway")
        await stack.enter_async_context(_process(folder / "shim.log", shim, "endpoint-picker"))
        conf = folder / "nginx.conf"
        endpoints = [one.endpoint for one in workers]
        conf.write_text(nginx_conf(folder, port, router_port, endpoints, more))
        nginx = ("nginx", "-p", str(folder), "-c", str(conf))
        await stack.enter_async_context(_process(folder / "stderr.log", *nginx))
        for listening in (SHIM_PORT, port):
            await until(lambda at=listening: _listens(at), f"{listening} listens")  # type: ignore[misc]
        await system.start_router()
        yield system


@contextlib.asynccontextmanager
async def _process(log: Path, *command: str) -> AsyncIterator[None]:
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=DEVNULL, stdout=file, stderr=file
        )
    try:
        yield
        assert process.returncode is None, f"{command} ended, see {log}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
