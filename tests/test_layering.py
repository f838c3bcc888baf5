"""The import rules of the architecture: which module may know which."""

import re

import pytest

from tests.house import MODULES, ROOT, importers_of, imports_of, impurities, pure_modules

# The core: what is in these must be pure. Others may be; tests.house says which are.
CORE = {
    *("extproc.http2", "extproc.picking", "extproc.requests", "kvstate.wire"),
    *("extproc.address", "extproc.errors", "extproc.headers", "extproc.envoy_config"),
    *("extproc.endpoint_files", "extproc.envoy_patch", "extproc.envoy_routers"),
    *("extproc.yaml_edit", "kvstate.scan"),
    *("extproc.admin.observed", "extproc.checking.evidence", "extproc.checking.self_check"),
    *("extproc.config.schema", "extproc.config.rules", "extproc.config.fleet_rules"),
    *("extproc.discovery.pods", "extproc.discovery.view"),
    *("extproc.doctor.envoy_dump", "extproc.doctor.findings"),
    *("extproc.observing.decisions", "extproc.observing.elsewhere", "extproc.observing.outcomes"),
    *("extproc.observing.report", "extproc.observing.comparison", "extproc.observing.verdict"),
    "extproc.admin.report_page",
    *("extproc.serving.stream", "extproc.serving.stream_answers"),
    *("extproc.sharing.messages", "extproc.sharing.picture", "extproc.sharing.telling"),
    *("extproc.tokenizing.remote_tokenizer_wire", "extproc.tokenizing.tokenizer_layout"),
    *("kvstate.bridge.mirror", "kvstate.bridge.rank"),
    *("kvstate.core", "kvstate.index", "kvstate.owner", "kvstate.plain_core"),
    *("kvstate.events", "kvstate.overlap"),
    "kvstate.feeds.feed",
}


def _is_core(name: str) -> bool:
    return name in CORE or name.rpartition(".")[0] in CORE


def test_worker_state_knows_nothing_of_requests() -> None:
    assert not {name for name in importers_of("extproc") if name.startswith("kvstate")}


def test_the_simulator_knows_neither_side_and_only_commands_know_it() -> None:
    assert not {name for name in MODULES if name.startswith("simulator")} & (
        importers_of("extproc") | importers_of("kvstate")
    )
    outside = {name for name in importers_of("simulator") if not name.startswith("simulator")}
    assert outside == {"extproc.__main__", "extproc.demo"}


@pytest.mark.parametrize("module", [name for name in MODULES if _is_core(name)])
def test_the_core_is_pure(module: str) -> None:
    assert not list(impurities(module))
    ours = {name for name in imports_of(module) if name in MODULES}
    assert ours <= pure_modules()


def test_what_the_core_names_exists() -> None:
    assert set(MODULES) >= CORE


def test_sockets_of_zmq_and_grpc_live_in_their_transports() -> None:
    ours = {name for name in importers_of("zmq") if not name.startswith("simulator")}
    assert not ours  # feeds speak ZMTP themselves: libzmq aborts the process
    served = {"extproc.serving.grpc_server", "extproc.health", "kvstate.bridge.bridge"}
    feeds = {"kvstate.feeds.grpc_transport"}
    assert importers_of("grpc") == {*served, *feeds}


def test_envoys_messages_live_in_the_stream_and_the_servers() -> None:
    servers = {"extproc.serving.grpc_server", "extproc.health"}
    assert importers_of("extproc.pb") == {
        *servers,
        "extproc.requests.grpc_request",
        "extproc.serving.exchange",
        "extproc.serving.lean_call",
        "extproc.serving.health_service",
        "extproc.serving.stream",
        "extproc.serving.stream_answers",
    }
    assert importers_of("envoy_data_plane") == {
        "extproc.envoy_config",
        "extproc.envoy_patch",
        "extproc.envoy_routers",
    }


def test_opentelemetry_is_an_extra_that_one_package_knows() -> None:
    assert importers_of("opentelemetry") == {
        "extproc.tracing.otlp",
    }
    assert importers_of("extproc.tracing.otlp") == {"extproc.tracing.telemetry"}


def test_the_compiled_core_does_no_input_or_output() -> None:
    headers = {"stdbool.h", "stddef.h", "stdint.h", "stdlib.h", "string.h", "Python.h"}
    for source in sorted((ROOT / "kvstate" / "native").glob("*.[ch]")):
        included = set(re.findall(r"#include <(\S+)>", source.read_text()))
        assert included <= headers, source.name


def test_the_folder_envoy_is_no_package_of_ours() -> None:
    assert not (ROOT / "envoy" / "__init__.py").exists()
