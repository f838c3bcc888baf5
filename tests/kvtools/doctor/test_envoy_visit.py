"""A real Envoy, as `kvsteer envoy` configures it, and with easily forgotten parts missing."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import ClientSession, web

from extproc.config.schema import Accounting, Config, Envoy, ExtProc, Policy, WorkerSettings
from extproc.config.sections import HoldSettings, RouterTls
from extproc.envoy.endpoint_files import Lane, assignment, path_of
from extproc.envoy.envoy_config import render
from kvtools.doctor.doctor import examine
from kvtools.doctor.findings import STEERING, Severity
from tests.extproc.serving.identities import Identities
from tests.kvtools.doctor.fleet import BRIEF, MODEL, SECONDS
from tests.ports import free_port
from tests.system.envoy_process import running_envoy


def configuration() -> Config:
    return Config(
        extproc=ExtProc(listen=f"127.0.0.1:{free_port()}"),
        models=(MODEL,),
        workers=(WorkerSettings(f"127.0.0.1:{free_port()}"),),
        envoy=Envoy(listen=f"127.0.0.1:{free_port()}", admin=f"127.0.0.1:{free_port()}"),
    )


async def found_in(config: Config, text: str) -> list[tuple[Severity, str]]:
    async with running_envoy(text, int(config.envoy.admin.rpartition(":")[2])):
        found = await examine(config, SECONDS, probes=False, bounds=BRIEF)
    return [(one.verdict, one.code) for one in found if one.check == "envoy"]


def spoil(tree: Any) -> None:
    """Removes from a configuration what makes Envoy steer well."""
    (listener,) = tree["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    del manager["early_header_mutation_extensions"]
    del manager["route_config"]["virtual_hosts"][0]["request_body_buffer_limit"]
    ext_proc = manager["http_filters"][0]["typed_config"]
    for key in ("message_timeout", "metadata_options", "failure_mode_allow"):
        del ext_proc[key]
    for cluster in tree["static_resources"]["clusters"]:
        cluster.pop("load_balancing_policy", None)


async def test_rendered_envoy_is_right() -> None:
    config = configuration()
    assert await found_in(config, render(config)) == [(Severity.RIGHT, "")]


async def test_envoy_option_names_the_admin_server() -> None:
    config = configuration()
    at = config.envoy.admin
    elsewhere = replace(config, envoy=replace(config.envoy, admin=f"127.0.0.1:{free_port()}"))
    async with running_envoy(render(config), int(at.rpartition(":")[2])):
        port = f"localhost:{at[10:]}"
        found = await examine(elsewhere, SECONDS, probes=False, bounds=BRIEF, envoy=port)
    (one,) = (one for one in found if one.check == "envoy")
    assert (one.subject, one.verdict, one.code) == (f"envoy {port}", Severity.RIGHT, "")


@asynccontextmanager
async def slow_to_tell_its_clusters(admin: str) -> AsyncIterator[str]:
    """The address at which an admin server answers as it does, but /clusters half a second late."""

    async def passed_on(request: web.Request) -> web.Response:
        if request.path == "/clusters":
            await asyncio.sleep(0.5)
        async with (
            ClientSession() as session,
            session.get(f"http://{admin}{request.path_qs}") as at,
        ):
            return web.Response(body=await at.read(), status=at.status)

    application = web.Application()
    application.router.add_get("/{any:.*}", passed_on)
    runner, port = web.AppRunner(application), free_port()
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await runner.cleanup()


async def test_request_of_the_doctor_is_none_that_envoy_could_not_pass_on() -> None:
    config = configuration()  # nobody listens where its router should
    admin = config.envoy.admin
    async with (
        running_envoy(render(config), int(admin.rpartition(":")[2])),
        slow_to_tell_its_clusters(admin) as slow,
    ):
        found = await examine(config, SECONDS, probes=False, bounds=BRIEF, envoy=slow)
    assert [one.code for one in found if one.check == "envoy"] == [""]
    assert [one.code for one in found if one.check == STEERING] == ["router-down"]


async def test_router_that_envoy_never_reached_is_found() -> None:
    config = configuration()  # nobody listens there
    async with running_envoy(render(config), int(config.envoy.admin.rpartition(":")[2])):
        async with ClientSession() as session:
            await session.post(f"http://{config.envoy.listen}/v1/completions", json={"prompt": "a"})
        found = await examine(config, SECONDS, probes=False, bounds=BRIEF)
    (one,) = (one for one in found if one.check == "envoy")
    assert one.code == "envoy-router-unreachable"
    says = rf"cluster kvsteer: all \d+ connections to {config.extproc.listen} failed"
    assert re.fullmatch(says, one.says)


def with_tls(config: Config, files: Identities, *, is_mutual: bool = False) -> Config:
    """The same configuration, with TLS from Envoy to the router."""
    certificate, key = files.tls_files() if is_mutual else (None, None)
    router_tls = RouterTls(ca=str(files.ca_file), certificate=certificate, key=key)
    return replace(
        config,
        extproc=replace(config.extproc, tls=files.tls(is_mutual=is_mutual)),
        envoy=replace(config.envoy, router_tls=router_tls),
    )


async def test_tls_on_one_side_is_found(tmp_path: Path) -> None:
    plain = configuration()
    encrypted = with_tls(plain, Identities(tmp_path))
    assert await found_in(encrypted, render(encrypted)) == [(Severity.RIGHT, "")]
    found = await found_in(encrypted, render(plain))
    assert found == [(Severity.WRONG, "envoy-plain-to-tls")]
    found = await found_in(plain, render(encrypted))
    assert found == [(Severity.WRONG, "envoy-tls-to-plain")]


async def test_envoy_without_a_required_certificate_is_found(tmp_path: Path) -> None:
    files = Identities(tmp_path)
    mutual = with_tls(configuration(), files, is_mutual=True)
    assert await found_in(mutual, render(mutual)) == [(Severity.RIGHT, "")]
    found = await found_in(mutual, render(with_tls(mutual, files)))
    assert found == [(Severity.WRONG, "envoy-no-client-certificate")]


async def test_missing_parts_of_an_envoy_are_found() -> None:
    config = configuration()
    tree = yaml.safe_load(render(config))
    spoil(tree)
    found = await found_in(config, yaml.safe_dump(tree))
    assert {code for _, code in found} == {
        "envoy-message-timeout",
        "envoy-fails-closed",
        "envoy-namespaces",
        "envoy-client-header",
        "envoy-buffer-limit",
        "envoy-no-override",
    }


Tree = Any


def parts(tree: Tree) -> tuple[Tree, Tree, Tree]:
    """The filter, the virtual host and the clusters by name."""
    (listener,) = tree["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    clusters = {one["name"]: one for one in tree["static_resources"]["clusters"]}
    return (
        manager["http_filters"][0]["typed_config"],
        manager["route_config"]["virtual_hosts"][0],
        clusters,
    )


def hosts_of(cluster: Tree) -> list[Tree]:
    hosts: list[Tree] = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    return hosts


def no_hosts(tree: Tree) -> None:
    _, _, clusters = parts(tree)
    del clusters["workers"]["load_assignment"]["endpoints"]


def another_host(tree: Tree) -> None:
    _, _, clusters = parts(tree)
    place = {"socket_address": {"address": "127.0.0.9", "port_value": 8000}}
    hosts_of(clusters["workers"]).append({"endpoint": {"address": place}})


def router_elsewhere(tree: Tree) -> None:
    _, _, clusters = parts(tree)
    place = hosts_of(clusters["kvsteer"])[0]["endpoint"]["address"]["socket_address"]
    place["port_value"] += 1


def router_http1(tree: Tree) -> None:
    _, _, clusters = parts(tree)
    del clusters["kvsteer"]["typed_extension_protocol_options"]


def disabled(tree: Tree) -> None:
    _, host, _ = parts(tree)
    per_route = "type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExtProcPerRoute"
    own = {"@type": per_route, "disabled": True}
    host["routes"][0]["typed_per_filter_config"] = {"envoy.filters.http.ext_proc": own}


def hasty(tree: Tree) -> None:
    _, host, _ = parts(tree)
    del host["routes"][0]["route"]["timeout"]


def no_retries(tree: Tree) -> None:
    _, host, _ = parts(tree)
    del host["retry_policy"]


def no_trailers(tree: Tree) -> None:
    ext_proc, _, _ = parts(tree)
    del ext_proc["processing_mode"]["response_trailer_mode"]


@pytest.mark.parametrize(
    ("plant", "code"),
    [
        (no_hosts, "envoy-worker-missing"),
        (another_host, "envoy-host-unknown"),
        (router_elsewhere, "envoy-router-place"),
        (router_http1, "envoy-router-protocol"),
        (disabled, "envoy-route-disabled"),
        (hasty, "envoy-route-timeout"),
        (no_retries, "envoy-no-retries"),
    ],
)
async def test_silent_causes_of_other_picks_are_found(
    plant: Callable[[Tree], None], code: str
) -> None:
    config = configuration()
    tree = yaml.safe_load(render(config))
    plant(tree)
    assert await found_in(config, yaml.safe_dump(tree)) == [(Severity.WRONG, code)]


async def test_envoy_that_does_not_wait_for_held_requests_is_found() -> None:
    config = configuration()
    holding = replace(config, policy=Policy(hold=HoldSettings(enabled=True)))
    assert await found_in(holding, render(holding)) == [(Severity.RIGHT, "")]
    tree = yaml.safe_load(render(config))
    _, host, _ = parts(tree)
    host["routes"][0]["route"]["idle_timeout"] = "60s"
    found = await found_in(holding, yaml.safe_dump(tree))
    codes = ["envoy-hold-message-timeout", "envoy-hold-limit"]
    assert found == [(Severity.WRONG, code) for code in codes]


async def test_response_without_trailers_is_noted() -> None:
    config = configuration()
    tree = yaml.safe_load(render(config))
    no_trailers(tree)
    assert await found_in(config, yaml.safe_dump(tree)) == [(Severity.NOTE, "")]


async def test_missing_response_headers_are_found() -> None:
    config = configuration()
    accounting = replace(config, accounting=Accounting(responses="usage"))
    assert await found_in(accounting, render(accounting)) == [(Severity.RIGHT, "")]
    found = await found_in(accounting, render(config))
    assert found == [(Severity.WRONG, "envoy-response-headers")]


def tell_envoy(directory: Path, worker: WorkerSettings) -> None:
    text = assignment("workers", [Lane(worker.endpoint, is_open=True)])
    Path(path_of(str(directory), "workers")).write_text(text)


async def test_hosts_from_eds_are_compared_too(tmp_path: Path) -> None:
    config = configuration()
    follows = replace(config, envoy=replace(config.envoy, eds_directory=str(tmp_path)))
    (worker,) = follows.workers
    tell_envoy(tmp_path, worker)
    assert await found_in(follows, render(follows)) == [(Severity.RIGHT, "")]
    more = replace(follows, workers=(worker, WorkerSettings(f"127.0.0.1:{free_port()}")))
    found = await found_in(more, render(follows))
    assert found == [(Severity.WRONG, "envoy-worker-missing")]
