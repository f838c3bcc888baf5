"""The import rules of the architecture: which module may know which."""

import re

import pytest

from tests.imports import (
    MODULES,
    ROOT,
    SIMULATOR,
    circles_of_packages,
    importers_of,
    imports_of,
    impurities,
    is_measured,
    pure_modules,
)

# The core: what is in these must be pure. Others may be; tests.imports says which are.
CORE = {
    "extproc.http2",
    "extproc.routing",
    "extproc.disaggregation.legs",
    "extproc.disaggregation.transfer_fields",
    "extproc.disaggregation.disaggregator",
    "extproc.renderers",
    "extproc.requests",
    "extproc.media",
    "kvstate.wire",
    "extproc.base.address",
    "extproc.base.errors",
    "extproc.base.headers",
    "extproc.envoy.envoy_config",
    "extproc.envoy.endpoint_files",
    "extproc.envoy.hashing",
    "kvtools.envoy.envoy_patch",
    "extproc.envoy.envoy_routers",
    "kvtools.envoy.hold_limits",
    "kvtools.envoy.yaml_edit",
    "kvstate.scan",
    "kvstate.seldom",
    "kvstate.index.turnover",
    "extproc.admin.history",
    "extproc.admin.observations",
    "extproc.admin.prefixes",
    "extproc.admin.recent",
    "extproc.proof.lookups",
    "extproc.proof.state",
    "extproc.config.policies",
    "extproc.config.schema",
    "extproc.config.rules",
    "extproc.config.fleet_rules",
    "extproc.config.feature_doubts",
    "extproc.config.feed_kinds",
    "extproc.features.feature",
    "extproc.features.hooks",
    "extproc.features.fetching.offers",
    "extproc.features.fetching.pulling",
    "extproc.features.fetching.stores",
    "extproc.features.fetching.term",
    "extproc.features.holding.hold",
    "extproc.features.holding.limit",
    "extproc.fleet.records.engine_identity",
    "extproc.fleet.discovery.pods",
    "extproc.fleet.discovery.view",
    "kvtools.doctor.envoy_dump",
    "kvtools.doctor.faults",
    "kvtools.doctor.findings",
    "extproc.observing.decisions",
    "extproc.observing.deliveries",
    "extproc.observing.outcomes",
    "extproc.observing.report",
    "extproc.observing.comparison",
    "extproc.observing.verdict",
    "extproc.observing.interval",
    "extproc.observing.usage",
    "extproc.admin.hosts",
    "kvstate.feeds.stamps",
    "extproc.admin.report_page",
    "extproc.serving.proxy_decoder",
    "extproc.serving.proxy_message",
    "extproc.serving.stream",
    "extproc.serving.stream_answers",
    "extproc.sharing.messages",
    "extproc.sharing.other_routers",
    "extproc.sharing.reporter",
    "extproc.tokenizing.remote_tokenizer_wire",
    "extproc.tokenizing.tokenizer_layout",
    "kvstate.bridge.mirror",
    "kvstate.bridge.rank",
    "kvstate.index.core",
    "kvstate.index.index",
    "kvstate.index.orphans",
    "kvstate.index.owner",
    "kvstate.events",
    "kvstate.overlap",
    "kvstate.feeds.feed",
    "kvstate.feeds.held_batches",
    "kvstate.feeds.replay_trust",
}


# From the lowest layer to the highest: a module imports only from its own layer and lower ones.
LAYERS = (
    "kvstate",
    "extproc.base",
    "extproc.http2",
    "extproc.config",
    "extproc.requests",
    "extproc.templates",
    "extproc.renderers",
    "extproc.tokenizing",
    "extproc.media",
    "extproc.envoy",
    "extproc.proof",
    "extproc.routing",
    "extproc.disaggregation",
    "extproc.sharing",
    "extproc.observing",
    "extproc.fleet",
    "extproc.features",
    "extproc.serving",
    "extproc.admin",
    "extproc.running",
    "extproc.commands",
    "extproc.__main__",
)


# What the tools may import, with what it is to them: a package with all that is in it, or a module.
# `kvtools` says more. The last ones are inner parts of the router, each with the reason.
PUBLIC = {
    "extproc.base": "addresses, errors, engines, kinds of faults",
    "extproc.commands": "how commands are told what to do, ask a router, read its JSON and show it",
    "extproc.config": "a configuration: read, typed, checked",
    "extproc.envoy.envoy_config": "Envoy's configuration, which --patch adds to another",
    "extproc.envoy.hashing": "the same: which headers Envoy hashes without a pick",
    "extproc.requests": "what a request asks, as the engines read it",
    "extproc.routing": "a decision, and the view that it is made on",
    "extproc.tokenizing.tokens": "the tokens of a prompt",
    "kvstate.bridge": "the server that `bridge` runs",
    "kvstate.errors": "the exception tree",
    "kvstate.events": "what a feed tells",
    "kvstate.feeds": "a feed",
    "kvstate.overlap": "tokens, blocks and keys of a prompt",
    "kvstate.undecodable": "what is no valid JSON",
    "kvstate.wire": "the layouts of feeds",
}
INNER = {
    "extproc.__main__": "completion completes the options of all commands",
    "extproc.disaggregation.legs": "whatif plays the legs of a request",
    "extproc.features.fetching": "whatif plays pulls and stores, which this part prices",
    "extproc.features.holding": "whatif plays who waits for room",
    "extproc.fleet.asking": "doctor asks workers as the router does, so that both see the same",
    "extproc.fleet.discovery": "doctor finds workers as the router does",
    "extproc.fleet.feeds": "doctor and bridge open feeds as the router does",
    "extproc.fleet.identity": "doctor tells engines apart as the router does",
    "extproc.fleet.records.engine_identity": "doctor tells engines apart as the router does",
    "extproc.proof.golden": "doctor asks the golden requests",
    "extproc.serving.certificates": "doctor reads certificates as the router does",
    "extproc.sharing": "doctor hears other routers, whatif plays several",
    "extproc.tokenizing.remote_tokenizer_wire": "doctor asks for tokens as the router does",
}


def _layer_of(module: str) -> int:
    """Returns the number of a module's layer, -1 for what has none: the topmost package."""
    layers = [n for n, layer in enumerate(LAYERS) if f"{module}.".startswith(f"{layer}.")]
    return layers[0] if layers else -1


def _is_core(name: str) -> bool:
    return name in CORE or name.rpartition(".")[0] in CORE


def test_layers_import_only_lower_ones() -> None:
    product = [name for name in MODULES if name.startswith(("extproc.", "kvstate."))]
    assert not [name for name in product if _layer_of(name) == -1]
    assert not [
        f"{name} imports {one}"
        for name in product
        for one in imports_of(name)
        if _layer_of(one) > _layer_of(name)
    ]


def test_packages_import_each_other_without_a_cycle() -> None:
    assert not circles_of_packages()


def test_kvstate_imports_nothing_of_extproc() -> None:
    assert not {name for name in importers_of("extproc") if name.startswith("kvstate")}


def test_simulator_imports_neither_side_and_only_the_demo_imports_it() -> None:
    inside = {name for name in MODULES if not is_measured(name)}
    assert not inside & (importers_of("extproc") | importers_of("kvstate"))
    assert importers_of(SIMULATOR) - inside == {"kvtools.demo.demo"}


def test_router_imports_none_of_the_tools() -> None:
    assert {name.partition(".")[0] for name in importers_of("kvtools")} == {"kvtools"}


def _is_in(module: str, part: str) -> bool:
    return f"{module}.".startswith(f"{part}.")


def test_tools_import_of_the_router_only_what_is_listed() -> None:
    listed = PUBLIC | INNER
    imported = {
        (name, one)
        for name in MODULES
        if _is_in(name, "kvtools")
        for one in imports_of(name)
        if one.startswith(("extproc", "kvstate"))
    }
    assert not [pair for pair in imported if not any(_is_in(pair[1], part) for part in listed)]
    assert not [part for part in listed if not any(_is_in(one, part) for _, one in imported)]


def test_core_is_pure() -> None:
    core = [name for name in MODULES if _is_core(name)]
    assert not {name: shown for name in core if (shown := [*impurities(name)])}
    pure = pure_modules()
    assert not {
        name: impure
        for name in core
        if (impure := {one for one in imports_of(name) if one in MODULES} - pure)
    }


def test_core_list_names_existing_modules() -> None:
    assert set(MODULES) >= CORE


def test_sockets_of_zmq_and_grpc_live_in_their_transports() -> None:
    assert not {
        name for name in importers_of("zmq") if is_measured(name)
    }  # feeds speak ZMTP themselves: libzmq aborts the process
    assert importers_of("grpc") == {"kvstate.bridge.bridge", "kvstate.feeds.grpc_transport"}


def test_envoy_messages_live_in_the_stream_and_the_server() -> None:
    assert importers_of("extproc.pb") == {
        "extproc.requests.grpc_request",
        "extproc.serving.lean_call",
        "extproc.serving.health_service",
        "extproc.serving.proxy_decoder",
        "extproc.serving.proxy_message",
        "extproc.serving.stream",
        "extproc.serving.stream_answers",
    }
    assert importers_of("envoy_data_plane") == {
        "extproc.envoy.envoy_config",
        "kvtools.envoy.envoy_patch",
        "extproc.envoy.envoy_routers",
        "extproc.envoy.hashing",
        "extproc.envoy.model_finder",
    }


def test_opentelemetry_is_imported_by_what_sends_to_it() -> None:
    assert importers_of("opentelemetry") == {
        "extproc.observing.otlp",
        "extproc.observing.otlp_metrics",
        "extproc.observing.spans",
    }
    assert importers_of("extproc.observing.otlp") == {"extproc.observing.telemetry"}


@pytest.mark.parametrize("package", ["kvstate", "extproc"])
def test_compiled_core_does_no_input_or_output(package: str) -> None:
    headers = {"math.h", "stdbool.h", "stddef.h", "stdint.h", "stdlib.h", "string.h"}
    headers |= {"Python.h", "structmember.h"}  # the latter is a part of Python
    for source in sorted((ROOT / package / "native").glob("*.[ch]")):
        included = set(re.findall(r"#include <(\S+)>", source.read_text()))
        assert included <= headers, source.name


def test_envoy_folder_is_no_package() -> None:
    assert not (ROOT / "envoy" / "__init__.py").exists()
