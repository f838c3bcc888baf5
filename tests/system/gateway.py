"""A real Envoy in either dialect, a router in this process, and the test's own workers."""

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import aiohttp
import yaml
from aiohttp import web
from prometheus_client import generate_latest

from extproc.config.reader import parse
from extproc.config.schema import Config
from extproc.envoy.envoy_config import render
from extproc.fleet.workers import Workers
from extproc.observing.metrics import Metrics
from extproc.serving.exchange import Service
from extproc.serving.lean_server import LeanServer
from extproc.serving.router import Router
from kvstate.fleet import FollowedWorkers
from tests.ports import free_port
from tests.system.configuration import configuration, patient
from tests.system.envoy_process import running_envoy

BUFFERED = "BUFFERED"
DUPLEX = "FULL_DUPLEX_STREAMED"

# Names the only endpoints that a request may go to; Envoy turns it into the subset hint.
SUBSET = "x-test-subset"

Tree = dict[str, Any]
Edit = Callable[[Tree], None]

PROMPT = {"model": "m", "prompt": [1, 2, 3]}


@dataclass
class Gateway:
    """The running Envoy and router; port is Envoy's."""

    url: str
    port: int
    session: aiohttp.ClientSession
    router: Router
    workers: Workers
    metrics: Metrics
    server: LeanServer

    async def post(
        self, body: Any = None, path: str = "/v1/completions", **options: Any
    ) -> tuple[int, str, bytes]:
        """Sends a request; returns the status, the worker that answered and the answer."""
        body = json.dumps(PROMPT).encode() if body is None else body
        async with self.session.post(f"{self.url}{path}", data=body, **options) as response:
            return response.status, response.headers.get("x-worker", ""), await response.read()

    def counted(self, line: str) -> float:
        """The value of one metric of the router; 0 where it is absent."""
        for shown in generate_latest(self.metrics).decode().splitlines():
            name, _, value = shown.rpartition(" ")
            if name == line:
                return float(value)
        return 0.0


def worker_app(name: str) -> web.Application:
    """A worker that returns its name and the request that it received."""

    async def echo(request: web.Request) -> web.Response:
        status = int(request.headers.get("x-test-status", "200"))
        kind = request.content_type
        response = web.Response(body=await request.read(), status=status, content_type=kind)
        response.headers["x-worker"] = name
        response.headers["x-saw-length"] = request.headers.get("content-length", "")
        response.headers["x-saw-names"] = ",".join(key.lower() for key in request.headers)
        response.headers.add("set-cookie", "a=1")
        response.headers.add("set-cookie", "b=2")
        return response

    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", echo)
    return app


@contextlib.asynccontextmanager
async def served(app: web.Application, port: int, host: str = "127.0.0.1") -> AsyncIterator[None]:
    """An HTTP/1.1 worker."""
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    try:
        yield
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def pool(size: int) -> AsyncIterator[list[str]]:
    """Workers on one IP, each on its own port, like data-parallel ranks of one pod."""
    async with contextlib.AsyncExitStack() as stack:
        endpoints = [f"127.0.0.1:{free_port()}" for _ in range(size)]
        for endpoint in endpoints:
            port = int(endpoint.rpartition(":")[2])
            await stack.enter_async_context(served(worker_app(endpoint), port))
        yield endpoints


@dataclass
class Picker:
    """A router and its server, in this process; listen is where an Envoy reaches it."""

    config: Config
    workers: Workers
    router: Router
    metrics: Metrics
    server: LeanServer

    @property
    def listen(self) -> str:
        """host:port."""
        return self.config.extproc.listen


@contextlib.asynccontextmanager
async def picker(
    endpoints: Sequence[str], changes: Tree | None = None, *, starts: bool = True
) -> AsyncIterator[Picker]:
    """A router in front of these workers; starts: whether it listens."""
    fleet = {
        "models": [{"name": "m"}],
        "workers": [{"endpoint": endpoint} for endpoint in endpoints],
    }
    text = yaml.safe_dump(patient(configuration(fleet | (changes or {}))))
    config = parse(text, "gateway")
    workers = Workers(config, FollowedWorkers(12345678, lambda: 0.0), lambda _: [])
    metrics = Metrics(workers.states)
    router = Router(config, workers, {}, metrics, Random(0))
    server = LeanServer(Service(config, router, metrics), lambda: True)
    if starts:
        await server.start()
    try:
        yield Picker(config, workers, router, metrics, server)
    finally:
        await server.stop()
        router.close()


@contextlib.asynccontextmanager
async def gateway(
    dialect: str,
    endpoints: Sequence[str],
    *,
    responses: str = "headers",
    changes: Tree | None = None,
    edits: Sequence[Edit] = (),
    starts: bool = True,
) -> AsyncIterator[Gateway]:
    """Envoy and a router in front of workers that listen, or do not, on these endpoints.

    changes: sections of the router's configuration. edits: of Envoy's. starts: whether the router
    listens.
    """
    sections = {"accounting": {"responses": responses}, **(changes or {})}
    async with contextlib.AsyncExitStack() as stack:
        one = await stack.enter_async_context(picker(endpoints, sections, starts=starts))
        tree = envoy_tree(render(one.config), dialect)
        for edit in edits:
            edit(tree)
        admin = int(one.config.envoy.admin.rpartition(":")[2])
        await stack.enter_async_context(running_envoy(yaml.safe_dump(tree), admin))
        timeout = aiohttp.ClientTimeout(total=60)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        url = f"http://{one.config.envoy.listen}"
        port = int(url.rpartition(":")[2])
        yield Gateway(url, port, session, one.router, one.workers, one.metrics, one.server)


def envoy_tree(text: str, dialect: str) -> Tree:
    """The output of `kvsteer envoy` in a dialect, with subset hints from the test's header."""
    tree: Tree = yaml.safe_load(text)
    manager = _manager(tree)
    manager["http_filters"].insert(0, _subset_filter())
    # Without it, Envoy drops trailers of HTTP/1.1.
    manager["http_protocol_options"] = {"enable_trailers": True}
    (ext_proc,) = [
        one["typed_config"]
        for one in manager["http_filters"]
        if one["name"] == "envoy.filters.http.ext_proc"
    ]
    spaces = ["envoy.lb", "envoy.lb.subset_hint"]
    ext_proc["metadata_options"]["forwarding_namespaces"] = {"untyped": spaces}
    ext_proc["processing_mode"]["request_body_mode"] = dialect
    if dialect == DUPLEX:
        _speak_duplex(tree, ext_proc)
    return tree


def _speak_duplex(tree: Tree, ext_proc: Tree) -> None:
    sent = ["request_header_mode", "response_header_mode"]
    sent += ["request_trailer_mode", "response_trailer_mode"]
    bodies = ("request_body_mode", "response_body_mode")
    ext_proc["processing_mode"] = dict.fromkeys(sent, "SEND") | dict.fromkeys(bodies, DUPLEX)
    del ext_proc["allow_mode_override"]
    (policy,) = tree["static_resources"]["clusters"][0]["load_balancing_policy"]["policies"]
    policy["typed_extension_config"]["typed_config"]["selected_host_key"] = {
        "key": "envoy.lb",
        "path": [{"key": "x-gateway-destination-endpoint-served"}],
    }


def with_h2_workers(tree: Tree) -> None:
    """Makes Envoy use HTTP/2 without TLS to workers."""
    name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    options = {
        "@type": f"type.googleapis.com/{name}",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    tree["static_resources"]["clusters"][0]["typed_extension_protocol_options"] = {name: options}


def without_retries(tree: Tree) -> None:
    """Makes Envoy try a request only once."""
    del _virtual_host(tree)["retry_policy"]


def with_original_destination(tree: Tree) -> None:
    """Makes the workers' cluster as Envoy AI Gateway does: only the header names an address."""
    (workers, *_) = tree["static_resources"]["clusters"]
    for key in ("load_assignment", "load_balancing_policy", "outlier_detection"):
        workers.pop(key, None)
    workers["type"] = "ORIGINAL_DST"
    workers["lb_policy"] = "CLUSTER_PROVIDED"
    workers["original_dst_lb_config"] = {
        "use_http_header": True,
        "http_header_name": "x-gateway-destination-endpoint",
    }


def knowing_one_worker(tree: Tree) -> None:
    """Leaves only the first worker in Envoy's cluster."""
    (members,) = tree["static_resources"]["clusters"][0]["load_assignment"]["endpoints"]
    del members["lb_endpoints"][1:]


def without_override(tree: Tree) -> None:
    """Makes the workers' cluster ignore picks."""
    del tree["static_resources"]["clusters"][0]["load_balancing_policy"]


def with_second_pool(endpoints: Sequence[str], percent: int, listen: str) -> Edit:
    """Sends this percentage of requests to a second cluster with its own picker.

    The header x-test-pool names one of them, 0 or 1. listen: the second picker's.
    """

    def edit(tree: Tree) -> None:
        (first, extproc) = tree["static_resources"]["clusters"]
        tree["static_resources"]["clusters"] += [
            {**first, "name": "second", "load_assignment": _members("second", endpoints)},
            {**extproc, "name": "picker", "load_assignment": _members("picker", [listen])},
        ]
        host = _virtual_host(tree)
        (route,) = host["routes"]
        second = {
            "route": {**route["route"], "cluster": "second"},
            "typed_per_filter_config": {"envoy.filters.http.ext_proc": _another_picker("picker")},
        }
        named = {"name": "x-test-pool", "string_match": {"exact": "1"}}
        other = {"name": "x-test-pool", "string_match": {"exact": "0"}}
        share = {"default_value": {"numerator": percent, "denominator": "HUNDRED"}}
        host["routes"] = [
            {**second, "match": {"prefix": "/", "headers": [named]}},
            {**route, "match": {"prefix": "/", "headers": [other]}},
            {**second, "match": {"prefix": "/", "runtime_fraction": share}},
            route,
        ]

    return edit


def _another_picker(cluster: str) -> Tree:
    kind = "envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
    return {
        "@type": f"type.googleapis.com/{kind}",
        "overrides": {"grpc_service": {"envoy_grpc": {"cluster_name": cluster}}},
    }


def _subset_filter() -> Tree:
    kind = "envoy.extensions.filters.http.header_to_metadata.v3.Config"
    rule = {
        "header": SUBSET,
        "on_header_present": {
            "metadata_namespace": "envoy.lb.subset_hint",
            "key": "x-gateway-destination-endpoint-subset",
            "type": "STRING",
        },
        "remove": True,
    }
    return {
        "name": "envoy.filters.http.header_to_metadata",
        "typed_config": {"@type": f"type.googleapis.com/{kind}", "request_rules": [rule]},
    }


def _manager(tree: Tree) -> Tree:
    (listener,) = tree["static_resources"]["listeners"]
    manager: Tree = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return manager


def _virtual_host(tree: Tree) -> Tree:
    host: Tree = _manager(tree)["route_config"]["virtual_hosts"][0]
    return host


def _members(name: str, endpoints: Sequence[str]) -> Tree:
    addresses = [endpoint.rpartition(":") for endpoint in endpoints]
    members = [
        {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}
        for host, _, port in addresses
    ]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": members}]}
