import asyncio
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from aiohttp import web

from extproc.config.owned_headers import RESERVED
from extproc.config.reader import parse
from extproc.config.schema import (
    Accounting,
    Config,
    Envoy,
    ExtProc,
    Model,
    Policy,
    WorkerSettings,
)
from extproc.config.sections import (
    FALLBACKS,
    ROUTER_CHOICES,
    SESSION_HEADERS,
    Classes,
    ClassSettings,
    Disaggregation,
    HoldSettings,
    Isolation,
    Routers,
)
from extproc.envoy.envoy_config import render
from tests.http_server import serving
from tests.ports import free_port
from tests.system.envoy_process import ENVOY, EnvoyDiedError, running_envoy

EXAMPLES = Path(__file__).parents[3] / "envoy"


def configuration(*endpoints: str, **sections: Any) -> Config:
    workers = tuple(WorkerSettings(endpoint) for endpoint in endpoints or ("127.0.0.1:8001",))
    return Config(models=(Model("tiny"),), workers=workers, **sections)


def two_models(first: str = "tiny", second: str = "org/big", port: int = 8001) -> Config:
    return Config(
        models=(Model(first), Model(second)),
        workers=(
            WorkerSettings(f"127.0.0.1:{port}", first),
            WorkerSettings("127.0.0.1:8002", second),
        ),
    )


def parsed(config: Config) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(render(config))
    return tree


def connection_manager(tree: dict[str, Any]) -> dict[str, Any]:
    listener = tree["static_resources"]["listeners"][0]
    manager: dict[str, Any] = listener["filter_chains"][0]["filters"][0]["typed_config"]
    return manager


def virtual_host(tree: dict[str, Any]) -> dict[str, Any]:
    host: dict[str, Any] = connection_manager(tree)["route_config"]["virtual_hosts"][0]
    return host


def ext_proc(tree: dict[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = connection_manager(tree)["http_filters"][0]["typed_config"]
    return settings


def clusters(tree: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {found["name"]: found for found in tree["static_resources"]["clusters"]}


def members(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    endpoints = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    return [member["endpoint"]["address"] for member in endpoints]


def override(cluster: dict[str, Any]) -> dict[str, Any]:
    policy = cluster["load_balancing_policy"]["policies"][0]["typed_extension_config"]
    settings: dict[str, Any] = policy["typed_config"]
    return settings


def socket_address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def meaning(tree: Any) -> Any:
    """Returns the tree with numbers in one form: JSON allows 0.5s and 0.500s, 5 and "5".

    The order of keys means nothing either.
    """
    if isinstance(tree, dict):
        return {key: meaning(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [meaning(value) for value in tree]
    number = re.fullmatch(r"([0-9.]+)(s?)", tree) if isinstance(tree, str) else None
    if number and tree.count(".") <= 1:
        return (float(number[1]), "seconds") if number[2] else float(number[1])
    return tree


def validate(text: str, directory: Path) -> None:
    file = directory / "envoy.yaml"
    file.write_text(text)
    command = [
        str(ENVOY),
        "--mode",
        "validate",
        "--disable-hot-restart",
        "-c",
        str(file),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def several(choice: str, *addresses: str, processes: int = 1) -> Config:
    routers = Routers(addresses or ("10.0.0.1:9002", "10.0.0.2:9002"), choice)
    return configuration(envoy=Envoy(routers=routers), extproc=ExtProc(processes=processes))


def priorities(config: Config) -> list[list[int]]:
    """The ports of the routers, by priority."""
    groups = clusters(parsed(config))["kvsteer"]["load_assignment"]["endpoints"]
    assert [int(group.get("priority", 0)) for group in groups] == list(range(len(groups)))
    return [
        [
            one["endpoint"]["address"]["socket_address"]["port_value"]
            for one in group["lb_endpoints"]
        ]
        for group in groups
    ]


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(configuration(), id="one model"),
        *(pytest.param(several(choice), id=choice) for choice in ROUTER_CHOICES),
        pytest.param(several("standby", "unix:/a", "router-b:9002", processes=2), id="mixed"),
        pytest.param(two_models(), id="two models"),
        pytest.param(configuration(extproc=ExtProc("unix:/run/kvsteer.sock")), id="unix socket"),
        pytest.param(configuration("worker-a:8000", "127.0.0.1:8001"), id="host names"),
        pytest.param(configuration("[2001:db8::1]:8000", "[::1]:8000"), id="IPv6"),
        pytest.param(configuration(accounting=Accounting("usage")), id="usage"),
    ],
)
def test_envoy_accepts_the_rendered_configuration(config: Config, tmp_path: Path) -> None:
    validate(render(config), tmp_path)


def test_health_checks_ask_several_routers_for_readiness() -> None:
    found = clusters(parsed(several("any")))["kvsteer"]
    (check,) = found["health_checks"]
    assert check["grpc_health_check"] == {}
    assert check["interval"] == check["no_traffic_interval"]
    assert found["common_lb_config"]["healthy_panic_threshold"] == {"value": 1}
    alone = clusters(parsed(configuration()))["kvsteer"]
    assert "health_checks" not in alone
    assert "common_lb_config" not in alone


@pytest.mark.parametrize("choice", ROUTER_CHOICES)
def test_stream_that_one_router_refuses_is_retried_on_another(choice: str) -> None:
    text = render(several(choice))
    assert "Needs Envoy 1.37 or newer" in text
    options = clusters(yaml.safe_load(text))["kvsteer"]["typed_extension_protocol_options"]
    retries = options["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]["retry_policy"]
    assert "connect-failure" in retries["retry_on"]
    assert ("retry_priority" in retries) is (choice == "standby")
    assert "Needs Envoy 1.36 or newer" in render(configuration())
    reading = configuration(accounting=Accounting(responses="headers"))
    assert "Needs Envoy 1.38 or newer" in render(reading)


def test_standby_router_has_a_lower_priority_with_all_its_processes() -> None:
    assert priorities(several("any")) == [[9002, 9002]]
    assert priorities(several("standby", "a:1", "b:2", "c:3")) == [[1], [2], [3]]
    assert priorities(several("standby", "a:1", "b:2", processes=2)) == [[1, 11], [2, 12]]


def test_router_of_a_conversation_follows_from_the_first_header_present() -> None:
    tree = parsed(several("conversation"))
    shown = ext_proc(tree)["grpc_service"]["initial_metadata"]
    name = SESSION_HEADERS[0]
    assert shown[0] == {"key": name, "value": f"%REQ({name}):128%"}
    options = clusters(tree)["kvsteer"]["typed_extension_protocol_options"]
    hashes = options["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]["hash_policy"]
    assert [one["header"]["header_name"] for one in hashes] == [one["key"] for one in shown]
    assert all(one["terminal"] for one in hashes)
    other = ext_proc(parsed(several("any")))["grpc_service"]
    assert "initial_metadata" not in other


def test_static_example_equals_the_rendered_configuration() -> None:
    example = yaml.safe_load((EXAMPLES / "envoy.yaml").read_text())
    rendered = parsed(configuration(*(f"127.0.0.1:{port}" for port in (8001, 8002, 8003))))
    assert meaning(example) == meaning(rendered)


def test_envoy_accepts_the_static_example(tmp_path: Path) -> None:
    validate((EXAMPLES / "envoy.yaml").read_text(), tmp_path)


def test_render_begins_with_a_heading_on_how_to_run_the_file() -> None:
    assert render(configuration()).startswith("# A complete Envoy configuration")
    assert "envoy -c FILE" in render(configuration()).splitlines()[0]


def test_client_headers_that_steer_are_removed() -> None:
    (extension,) = connection_manager(parsed(configuration()))["early_header_mutation_extensions"]
    removed = {mutation["remove"] for mutation in extension["typed_config"]["mutations"]}
    assert removed == RESERVED


def test_headers_of_sidecars_are_removed_where_tenants_are_apart() -> None:
    rules = Isolation("x-tenant", "secret")
    for mode in (None, "header"):
        tree = parsed(configuration(isolation=rules, disaggregation=Disaggregation(mode=mode)))
        (extension,) = connection_manager(tree)["early_header_mutation_extensions"]
        removed = [mutation["remove"] for mutation in extension["typed_config"]["mutations"]]
        sidecars = {"x-prefiller-host-port", "x-kv-cache-source-host-port", "x-encoder-hosts-ports"}
        assert sorted(removed) == sorted(RESERVED | sidecars)


def test_priorities_of_clients_are_removed_where_classes_are_on() -> None:
    one = ClassSettings("one")
    rules = Policy(classes=Classes("x-class", "one", (one, ClassSettings("two", 10))))
    tree = parsed(configuration(policy=rules))
    (extension,) = connection_manager(tree)["early_header_mutation_extensions"]
    removed = {mutation["remove"] for mutation in extension["typed_config"]["mutations"]}
    assert removed == RESERVED | {"x-vllm-priority"}


def test_requests_continue_while_the_router_is_away() -> None:
    assert ext_proc(parsed(configuration()))["failure_mode_allow"] is True


@pytest.mark.parametrize(("fail", "continues"), [("open", True), ("closed", False)])
def test_requests_of_isolated_tenants_continue_as_configured(fail: str, continues: bool) -> None:
    rules = Isolation("x-tenant", "secret", fail=fail)
    allowed = ext_proc(parsed(configuration(isolation=rules))).get("failure_mode_allow", False)
    assert allowed is continues


def test_override_reads_the_pick_from_metadata_only() -> None:
    tree = parsed(configuration())
    (source,) = override(clusters(tree)["workers"])["override_host_sources"]
    path = [{"key": "x-gateway-destination-endpoint"}]
    assert source == {"metadata": {"key": "envoy.lb", "path": path}}
    assert ext_proc(tree)["metadata_options"] == {"receiving_namespaces": {"untyped": ["envoy.lb"]}}


def test_fallback_policy_is_least_request() -> None:
    fallback = override(clusters(parsed(configuration()))["workers"])["fallback_policy"]
    (policy,) = fallback["policies"]
    assert policy["typed_extension_config"]["typed_config"]["@type"].endswith(".LeastRequest")


def test_fallback_of_sessions_hashes_the_first_header_that_names_one() -> None:
    by = Envoy(fallback="ring_hash")
    tree = parsed(configuration(envoy=by))
    (policy,) = override(clusters(tree)["workers"])["fallback_policy"]["policies"]
    assert policy["typed_extension_config"]["typed_config"]["@type"].endswith(".RingHash")
    (only,) = virtual_host(tree)["routes"]
    named = [one["header"]["header_name"] for one in only["route"]["hash_policy"]]
    assert tuple(named) == SESSION_HEADERS
    assert all(one["terminal"] for one in only["route"]["hash_policy"])
    mine = parsed(configuration(envoy=by, policy=Policy(session_header="X-Chat")))
    (only,) = virtual_host(mine)["routes"]
    assert only["route"]["hash_policy"] == [{"header": {"header_name": "x-chat"}, "terminal": True}]


def test_routes_hash_nothing_where_the_fallback_does_not() -> None:
    (only,) = virtual_host(parsed(configuration()))["routes"]
    assert "hash_policy" not in only["route"]


def test_processing_mode_buffers_request_bodies_and_ends_with_the_response() -> None:
    settings = ext_proc(parsed(configuration()))
    mode = settings["processing_mode"]
    assert mode["request_header_mode"] == "SEND"
    assert mode["request_body_mode"] == "BUFFERED"
    assert mode["response_header_mode"] == "SKIP"
    assert mode["response_trailer_mode"] == "SEND"
    assert settings["allow_mode_override"] is True


@pytest.mark.parametrize("responses", ["headers", "usage"])
def test_processing_mode_sends_responses_where_accounting_needs_them(
    responses: str,
) -> None:
    tree = parsed(configuration(accounting=Accounting(responses)))
    settings = ext_proc(tree)
    assert settings["processing_mode"]["response_header_mode"] == "SEND"
    assert settings["processing_mode"].get("response_body_mode", "NONE") == "NONE"
    assert settings["allow_mode_override"] is True
    assert settings["metadata_options"]["forwarding_namespaces"] == {"untyped": ["envoy.lb"]}
    path = [{"key": "x-gateway-destination-endpoint-served"}]
    written = override(clusters(tree)["workers"])["selected_host_key"]
    assert written == {"key": "envoy.lb", "path": path}


def test_processing_mode_sends_no_response_without_accounting() -> None:
    tree = parsed(configuration())
    assert "forwarding_namespaces" not in ext_proc(tree)["metadata_options"]
    assert "selected_host_key" not in override(clusters(tree)["workers"])


def test_timeouts_do_not_interrupt_a_long_generation() -> None:
    tree = parsed(two_models())
    assert connection_manager(tree)["stream_idle_timeout"] == "0s"
    assert [each["route"]["timeout"] for each in virtual_host(tree)["routes"]] == ["0s"] * 3


def test_retries_cover_only_requests_that_no_worker_has_seen() -> None:
    policy = virtual_host(parsed(configuration()))["retry_policy"]
    retried = set(policy["retry_on"].split(","))
    assert retried == {"connect-failure", "refused-stream", "reset-before-request"}
    assert policy["retry_back_off"] == {"base_interval": "0.001s", "max_interval": "0.010s"}


def test_circuit_breakers_exceed_the_defaults_of_envoy() -> None:
    for cluster in clusters(parsed(configuration())).values():
        (limits,) = cluster["circuit_breakers"]["thresholds"]
        assert limits["max_requests"] == limits["max_pending_requests"] == 100_000


def test_limits_and_addresses_follow_the_configuration() -> None:
    section = Envoy(
        "0.0.0.0:80",
        "[::1]:9",
        message_timeout_ms=1250,
        request_body_buffer_limit_bytes=4096,
    )
    tree = parsed(configuration(envoy=section))
    assert ext_proc(tree)["message_timeout"] == "1.250s"
    assert virtual_host(tree)["request_body_buffer_limit"] == 4096
    (listener,) = tree["static_resources"]["listeners"]
    assert listener["address"] == socket_address("0.0.0.0", 80)
    assert tree["admin"]["address"] == socket_address("::1", 9)


def test_envoy_waits_longer_than_a_hold_and_without_holds_has_no_such_limit() -> None:
    holds = Policy(hold=HoldSettings(enabled=True, bound_seconds=240))
    tree = parsed(configuration(policy=holds))
    assert ext_proc(tree)["max_message_timeout"] == "250s"
    assert connection_manager(tree)["stream_idle_timeout"] == "0s"
    assert {one["route"]["timeout"] for one in virtual_host(tree)["routes"]} == {"0s"}
    off = Policy(hold=HoldSettings(bound_seconds=240))
    assert render(configuration(policy=off)) == render(configuration())
    assert "max_message_timeout" not in render(configuration())


def test_localhost_is_rendered_as_an_ip_address() -> None:
    tree = parsed(configuration(envoy=Envoy(listen="localhost:80")))
    assert tree["static_resources"]["listeners"][0]["address"] == socket_address("127.0.0.1", 80)


@pytest.mark.parametrize(
    ("listen", "dialled"),
    [
        ("127.0.0.1:7", socket_address("127.0.0.1", 7)),
        ("0.0.0.0:7", socket_address("127.0.0.1", 7)),
        ("[::]:7", socket_address("::1", 7)),
        ("unix:run/k.sock", {"pipe": {"path": "run/k.sock"}}),
        ("unix:///run/k.sock", {"pipe": {"path": "/run/k.sock"}}),
    ],
)
def test_router_cluster_names_the_listener_of_the_router(
    listen: str, dialled: dict[str, Any]
) -> None:
    cluster = clusters(parsed(configuration(extproc=ExtProc(listen))))["kvsteer"]
    assert members(cluster) == [dialled]
    assert cluster["type"] == "STATIC"


def test_router_cluster_covers_all_processes_round_robin() -> None:
    cluster = clusters(parsed(configuration(extproc=ExtProc("127.0.0.1:7", processes=3))))[
        "kvsteer"
    ]
    assert members(cluster) == [socket_address("127.0.0.1", port) for port in (7, 17, 27)]
    assert not {"lb_policy", "load_balancing_policy"} & cluster.keys()  # round robin by default


def test_router_cluster_resolves_a_host_name() -> None:
    cluster = clusters(parsed(configuration(extproc=ExtProc("router:7"))))["kvsteer"]
    assert (cluster["type"], cluster["dns_lookup_family"]) == ("STRICT_DNS", "V4_PREFERRED")


def test_router_cluster_speaks_http2() -> None:
    (options,) = clusters(parsed(configuration()))["kvsteer"][
        "typed_extension_protocol_options"
    ].values()
    assert "http2_protocol_options" in options["explicit_http_config"]


def test_workers_by_ip_address_are_static() -> None:
    cluster = clusters(parsed(configuration("127.0.0.1:1", "[2001:db8::1]:2")))["workers"]
    assert cluster["type"] == "STATIC"
    assert members(cluster) == [socket_address("127.0.0.1", 1), socket_address("2001:db8::1", 2)]


def test_workers_by_host_name_are_resolved_with_ipv4_first() -> None:
    cluster = clusters(parsed(configuration("worker-a:8000", "127.0.0.1:1")))["workers"]
    assert (cluster["type"], cluster["dns_lookup_family"]) == ("STRICT_DNS", "V4_PREFERRED")
    assert members(cluster) == [socket_address("worker-a", 8000), socket_address("127.0.0.1", 1)]


def test_discovered_workers_are_read_from_a_file_for_each_model() -> None:
    config = replace(two_models(), envoy=Envoy(eds_directory="/run/kvsteer"))
    tree = parsed(config)
    first, second, _ = tree["static_resources"]["clusters"]
    paths = [
        one["eds_cluster_config"]["eds_config"]["path_config_source"]["path"]
        for one in (first, second)
    ]
    assert paths == ["/run/kvsteer/workers-tiny.json", "/run/kvsteer/workers-org-big.json"]
    assert (first["type"], "load_assignment" in first, "id" in tree["node"]) == ("EDS", False, True)


def test_models_have_a_cluster_and_a_route_each() -> None:
    tree = parsed(two_models())
    assert list(clusters(tree)) == ["workers-tiny", "workers-org-big", "kvsteer"]
    (_, big, _) = virtual_host(tree)["routes"]
    (header,) = big["match"]["headers"]
    assert header == {"name": "x-kvsteer-model", "string_match": {"exact": "org/big"}}
    assert big["route"]["cluster"] == "workers-org-big"


def test_request_without_a_known_model_goes_to_the_first_model() -> None:
    last = virtual_host(parsed(two_models()))["routes"][-1]
    assert last["match"] == {"prefix": "/"}
    assert last["route"]["cluster"] == "workers-tiny"


def test_model_finder_runs_with_several_models() -> None:
    models = (Model('a"]\n'), Model("b", aliases=("ü",), lora=("c",)))
    config = Config(models=models, workers=(WorkerSettings("127.0.0.1:1", "b"),))
    *_, finder, _ = connection_manager(parsed(config))["http_filters"]
    code = finder["typed_config"]["default_source_code"]["inline_string"]
    table = code.splitlines()[0].encode()
    plain = re.sub(rb"\\(\d{3})", lambda found: bytes([int(found[1])]), table)
    known = '["a"]\n"] = "a"]\n", ["b"] = "b", ["ü"] = "b", ["c"] = "b"'
    assert plain.decode() == f"local known = {{{known}}}"


def test_model_finder_is_omitted_with_one_model() -> None:
    names = [one["name"] for one in connection_manager(parsed(configuration()))["http_filters"]]
    assert names == ["envoy.filters.http.ext_proc", "envoy.filters.http.router"]


def test_clusters_of_models_that_differ_in_punctuation_are_distinct() -> None:
    assert list(clusters(parsed(two_models("a/b", "a.b"))))[:2] == ["workers-a-b", "workers-a-b-2"]


@pytest.mark.parametrize("fragments", [3, 4, 5], ids=["the two pieces", "three", "all"])
def test_envoy_accepts_the_fragments_in_a_bare_configuration(
    fragments: int, tmp_path: Path
) -> None:
    texts = (EXAMPLES / "add-to-your-envoy.yaml").read_text()
    pieces = [piece for piece in yaml.safe_load_all(texts) if piece][:fragments]
    tree = bare_envoy()
    manager, added = connection_manager(tree), pieces[0]
    manager["http_filters"][:0] = added["http_filters"]
    manager["early_header_mutation_extensions"] = added["early_header_mutation_extensions"]
    tree["static_resources"]["clusters"][0].update(pieces[1])
    tree["static_resources"]["clusters"].append(pieces[2])
    for piece in pieces[3:4]:
        virtual_host(tree).update(piece)
    for piece in pieces[4:]:
        other = {"match": {"prefix": "/api/"}, "route": {"cluster": "llm"}, **piece}
        virtual_host(tree)["routes"].insert(0, other)
    validate(yaml.safe_dump(tree), tmp_path)


def bare_envoy() -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load("""
static_resources:
  listeners:
  - address: {socket_address: {address: 127.0.0.1, port_value: 10000}}
    filter_chains:
    - filters:
      - name: envoy.filters.network.http_connection_manager
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: mine
          route_config:
            virtual_hosts:
            - {name: mine, domains: ["*"], routes: [{match: {prefix: /}, route: {cluster: llm}}]}
          http_filters:
          - name: envoy.filters.http.router
            typed_config:
              "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router
  clusters:
  - name: llm
    load_assignment:
      cluster_name: llm
      endpoints:
      - lb_endpoints:
        - endpoint: {address: {socket_address: {address: 127.0.0.1, port_value: 8001}}}
""")  # noqa: E501 - as a user writes it
    return tree


def on_loopback(config: Config) -> tuple[Config, str, int]:
    """The configuration on free ports, with no router, and the clients' URL and the admin port."""
    clients, admin = free_port(), free_port()
    envoy = Envoy(listen=f"127.0.0.1:{clients}", admin=f"127.0.0.1:{admin}")
    extproc = ExtProc(listen=f"127.0.0.1:{free_port()}")
    return replace(config, envoy=envoy, extproc=extproc), f"http://127.0.0.1:{clients}/", admin


@pytest.fixture
async def echo_port() -> AsyncIterator[int]:
    async def echo(request: web.Request) -> web.Response:
        return web.json_response({name.lower(): value for name, value in request.headers.items()})

    async with serving(echo) as address:
        yield int(address.rpartition(":")[2])


async def test_client_without_a_router_is_served_and_steers_nothing(
    echo_port: int,
) -> None:
    config, url, admin_port = on_loopback(two_models(port=echo_port))
    # Nobody listens at the model or the worker that the client names.
    spoofed = {"x-gateway-destination-endpoint": "127.0.0.1:8002", "x-kvsteer-model": "org/big"}
    async with (
        running_envoy(render(config), admin_port),
        aiohttp.request("POST", url, data=b"{}", headers=spoofed) as response,
    ):
        assert response.status == 200
        assert not RESERVED & set(await response.json())


async def test_dead_worker_fails_no_request_while_the_router_is_away(echo_port: int) -> None:
    dead = f"127.0.0.1:{free_port()}"
    config, url, admin_port = on_loopback(configuration(dead, f"127.0.0.1:{echo_port}"))
    async with running_envoy(render(config), admin_port), aiohttp.ClientSession() as session:

        async def status() -> int:
            async with session.post(url, data=b"{}") as response:
                return response.status

        assert await asyncio.gather(*(status() for _ in range(20))) == [200] * 20


@asynccontextmanager
async def named_workers(count: int) -> AsyncIterator[list[str]]:
    """Workers that answer with their own address."""
    runners, found = [], []
    for _ in range(count):
        address = f"127.0.0.1:{free_port()}"

        async def answer(_: web.Request, address: str = address) -> web.Response:
            return web.Response(text=address)

        app = web.Application()
        app.router.add_route("*", "/", answer)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", int(address.rpartition(":")[2])).start()
        found.append(address)
    yield found
    for runner in runners:
        await runner.cleanup()


async def answered_by(url: str, sessions: Iterable[str], header: str) -> dict[str, set[str]]:
    """Which workers answered three requests of each session; each has to be answered."""
    found: dict[str, set[str]] = {}
    async with aiohttp.ClientSession() as client:
        for session in [*sessions] * 3:
            async with client.post(url, data=b"{}", headers={header: session}) as response:
                assert response.status == 200
                found.setdefault(session, set()).add(await response.text())
    return found


SESSIONS = [f"session {number}" for number in range(24)]


@pytest.mark.parametrize("header", SESSION_HEADERS)
async def test_session_keeps_its_worker_while_the_router_is_away(header: str) -> None:
    async with named_workers(3) as workers:
        config, url, admin = on_loopback(configuration(*workers))
        config = replace(config, envoy=replace(config.envoy, fallback="ring_hash"))
        async with running_envoy(render(config), admin):
            found = await answered_by(url, SESSIONS, header)
    assert {len(one) for one in found.values()} == {1}
    assert {one for each in found.values() for one in each} == set(workers)


@pytest.mark.parametrize("fallback", FALLBACKS)
async def test_session_of_a_dead_worker_goes_elsewhere_and_none_fails(fallback: str) -> None:
    async with named_workers(2) as alive:
        dead = f"127.0.0.1:{free_port()}"
        config, url, admin = on_loopback(configuration(*alive, dead))
        config = replace(config, envoy=replace(config.envoy, fallback=fallback))
        async with running_envoy(render(config), admin):
            found = await answered_by(url, SESSIONS, "x-session-id")
    assert {one for each in found.values() for one in each} == set(alive)


async def test_envoy_that_does_not_start_shows_its_log() -> None:
    with pytest.raises(EnvoyDiedError, match="nonsense"):
        async with running_envoy("nonsense: 1", free_port()):
            pass


SPLIT = """models: [{name: m}, {name: n}]
workers:
- {endpoint: "10.0.0.1:1", model: m, role: decode}
- {endpoint: "10.0.0.2:1", model: m, role: prefill}
- {endpoint: "10.0.0.3:1", model: n}
disaggregation: {mode: %s, connector: %s}
"""


def members_of(one: dict[str, Any]) -> dict[str, str]:
    """The members of a cluster, with their configured health."""
    listed = one["load_assignment"]["endpoints"][0].get("lb_endpoints", [])
    return {
        each["endpoint"]["address"]["socket_address"]["address"]: each.get("health_status", "")
        for each in listed
    }


def split_by(mode: str, connector: str) -> tuple[dict[str, Any], list[Any], str]:
    """The clusters by name, the routes, and the whole text."""
    text = render(parse(SPLIT % (mode, connector), "c"))
    tree = yaml.safe_load(text)["static_resources"]
    manager = tree["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    routes = manager["route_config"]["virtual_hosts"][0]["routes"]
    return {one["name"]: one for one in tree["clusters"]}, routes, text


def test_prefill_worker_gets_no_request_by_itself() -> None:
    clusters, routes, text = split_by("header", "nixl")
    assert members_of(clusters["workers-m"]) == {"10.0.0.1": ""}
    assert "prefill-m" not in clusters
    assert all("request_mirror_policies" not in one["route"] for one in routes)
    assert "remove: x-prefiller-host-port" in text
    assert "remove: x-kv-cache-source-host-port" in text
    assert "remove: x-encoder-hosts-ports" in text


def test_routes_mirror_to_the_cluster_that_the_router_names() -> None:
    clusters, routes, text = split_by("mirror", "offloading")
    assert members_of(clusters["prefill-m"]) == {"10.0.0.2": ""}
    assert members_of(clusters["prefill-n"]) == {}
    assert len(routes) == 3
    for one in routes:
        (policy,) = one["route"]["request_mirror_policies"]
        assert policy["cluster_header"] == "x-kvsteer-prefill-cluster"
    for name in ("x-prefiller-host-port", "x-kvsteer-prefill-cluster", "x-kvsteer-prefill-tail"):
        assert f"remove: {name}" in text
    assert "envoy_on_request" in str(clusters["prefill-m"])


def test_envoy_chooses_no_worker_that_needs_a_partner() -> None:
    clusters, _, _ = split_by("mirror", "sglang")
    assert members_of(clusters["workers-m"]) == {"10.0.0.1": "DRAINING"}
    assert clusters["workers-m"]["common_lb_config"] == {"healthy_panic_threshold": {}}
    assert "common_lb_config" not in clusters["workers-n"]
    assert "http_filters" not in http_of(clusters["prefill-m"])


def http_of(one: dict[str, Any]) -> dict[str, Any]:
    """How Envoy speaks HTTP to a cluster."""
    options = one["typed_extension_protocol_options"]
    found: dict[str, Any] = options["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]
    return found


@pytest.mark.parametrize("connector", ["sglang", "offloading"])
def test_idle_connections_are_closed_before_the_workers_do(connector: str) -> None:
    clusters, _, _ = split_by("mirror", connector)
    for name in ("workers-m", "workers-n", "prefill-m"):
        assert http_of(clusters[name])["common_http_protocol_options"] == {"idle_timeout": "4s"}


@pytest.mark.slow
def test_render_is_equal_in_every_process(tmp_path: Path) -> None:
    file = tmp_path / "kvsteer.yaml"
    file.write_text(
        """
models: [{name: tiny, aliases: [a, b], lora: [c, d]}, {name: big, aliases: [e, f]}]
workers: [{endpoint: "10.0.0.1:1", model: tiny}, {endpoint: "worker:1", model: big}]
accounting: {responses: usage}
envoy: {routers: {addresses: ["10.0.0.1:9002", "10.0.0.2:9002"], choice: conversation}}
"""
    )
    command = [sys.executable, "-m", "extproc", "envoy", "--config", str(file)]
    texts = {
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
