"""NGINX Gateway Fabric without its cluster: its nginx, its script and its shim for the picker.

nginx is configured as the controller of 2.6 does it for a Gateway, an HTTPRoute to an InferencePool
with FailOpen and, if a test asks for them, its policies.
"""

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.manifests import KUBERNETES
from tests.gateways.gateways import Place, running_program
from tests.waiting import until

Tree = dict[str, Any]

OVERLAY = KUBERNETES / "overlays/nginx-gateway-fabric"
COMPONENTS = KUBERNETES / "components"
RELEASE = "2.6.7"
SHIM_PORT = 54800  # the shim's port, which is fixed in the script
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


def nginx_conf(place: Place, more: str) -> str:
    """What the controller writes for this pool. more: directives that its policies add."""
    folder = place.directory
    script = Path(os.environ["KVSTEER_NGF"]) / "epp.js"
    (folder / "epp.js").write_bytes(script.read_bytes())
    module = next(one for one in MODULES if one.exists())
    members = " ".join(f"server {worker};" for worker in place.workers)
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
    listen 127.0.0.1:{place.port};
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
      set $epp_port {place.router_port};
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


def configuration() -> Tree:
    """The router's, as it is published."""
    told: Tree = yaml.safe_load((COMPONENTS / "router-tls/kvsteer.yaml").read_text())
    return told


@contextlib.asynccontextmanager
async def running(more: str, place: Place) -> AsyncIterator[None]:
    """Runs the shim, with its own defaults, and nginx.

    more: nginx directives of the gateway's policies.
    """
    folder = place.directory
    conf = folder / "nginx.conf"
    conf.write_text(nginx_conf(place, more))
    shim = (str(Path(os.environ["KVSTEER_NGF"]) / "gateway"), "endpoint-picker")
    nginx = ("nginx", "-p", str(folder), "-c", str(conf))
    async with (
        running_program(shim, folder / "shim.log") as one,
        running_program(nginx, folder / "stderr.log") as other,
    ):

        async def listen() -> bool:
            one.check()
            other.check()
            return await _listens(SHIM_PORT) and await _listens(place.port)

        await until(listen, "the shim and nginx listen")
        yield


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
