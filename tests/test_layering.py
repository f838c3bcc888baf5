"""The import rules of the architecture: which module may know which."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.purity import COMPILED, IMPURE_STANDARD_LIBRARY, LIBRARIES, PURE

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("kvstate", "extproc", "simulator")
MODULES = sorted(
    path
    for package in PACKAGES
    for path in (ROOT / package).rglob("*.py")
    if "pb" not in path.parts
)


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports_of(path: Path) -> Iterator[str]:
    """Full names of what a module imports, inside its functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layers"
            module = node.module or ""
            yield from (_imported(module, alias.name) for alias in node.names)


def _imported(module: str, name: str) -> str:
    """A module, or the one that a name is taken from."""
    inside = ROOT / module.replace(".", "/") / name
    is_module = inside.is_dir() or inside.with_suffix(".py").is_file()
    return f"{module}.{name}" if is_module else module


IMPORTS = {name_of(path): set(imports_of(path)) for path in MODULES}


def importers_of(package: str) -> set[str]:
    return {
        name
        for name, imported in IMPORTS.items()
        if any(one == package or one.startswith(f"{package}.") for one in imported)
    }


def test_worker_state_knows_nothing_of_requests() -> None:
    assert not {name for name in importers_of("extproc") if name.startswith("kvstate")}


def test_the_simulator_knows_neither_side_and_only_commands_know_it() -> None:
    assert not {name for name in IMPORTS if name.startswith("simulator")} & (
        importers_of("extproc") | importers_of("kvstate")
    )
    outside = {name for name in importers_of("simulator") if not name.startswith("simulator")}
    assert outside == {"extproc.cli", "extproc.demo_configuration"}


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_import_only_what_is_pure(module: str) -> None:
    for imported in IMPORTS[module]:
        top = imported.partition(".")[0]
        if top in PACKAGES:
            generated = imported.startswith(("extproc.pb.", "kvstate.pb."))
            assert imported in (*PURE, COMPILED) or generated, imported
        elif top in sys.stdlib_module_names:
            assert top not in IMPURE_STANDARD_LIBRARY, imported
        else:
            assert top in LIBRARIES, imported


def test_sockets_of_zmq_and_grpc_live_in_their_transports() -> None:
    ours = {name for name in importers_of("zmq") if not name.startswith("simulator")}
    assert not ours  # feeds speak ZMTP themselves: libzmq aborts the process
    served = {"extproc.serving.grpc_server", "extproc.health", "kvstate.bridge.server"}
    feeds = {"kvstate.feeds.grpc_channel", "kvstate.feeds.grpc_transport"}
    assert importers_of("grpc") == {*served, *feeds}


def test_envoys_messages_live_in_the_stream_and_the_servers() -> None:
    servers = {"extproc.serving.grpc_server", "extproc.health"}
    assert importers_of("extproc.pb") == {
        *servers,
        "extproc.requests.grpc_request",
        "extproc.serving.exchange",
        "extproc.serving.ext_proc_call",
        "extproc.serving.health_call",
        "extproc.serving.health_service",
        "extproc.serving.heads",
        "extproc.serving.response_side",
        "extproc.serving.stream",
        "extproc.serving.stream_answers",
    }
    assert importers_of("envoy_data_plane") == {
        "extproc.envoy_clusters",
        "extproc.envoy_config",
        "extproc.envoy_tls",
    }


def test_opentelemetry_is_an_extra_that_one_package_knows() -> None:
    assert importers_of("opentelemetry") == {
        "extproc.tracing.metrics_data",
        "extproc.tracing.otlp",
        "extproc.tracing.spans",
    }
    assert importers_of("extproc.tracing.otlp") == {"extproc.tracing.telemetry"}


def test_the_compiled_core_does_no_input_or_output() -> None:
    headers = {"stdbool.h", "stddef.h", "stdint.h", "stdlib.h", "string.h", "Python.h"}
    for source in sorted((ROOT / "kvstate" / "native").glob("*.[ch]")):
        included = set(re.findall(r"#include <(\S+)>", source.read_text()))
        assert included <= headers, source.name


def test_every_pure_module_exists() -> None:
    assert set(PURE) <= IMPORTS.keys()


def test_the_folder_envoy_is_no_package_of_ours() -> None:
    assert not (ROOT / "envoy" / "__init__.py").exists()
