"""Envoy's `GET /config_dump`, held against what the router needs of it.

Source: `envoy.admin.v3.ConfigDump` as JSON: durations as "0.5s", 64-bit numbers as text, defaults
left out. What each setting is for is told in envoy/envoy.yaml.
"""

from collections.abc import Iterator, Mapping

import msgspec

from extproc.config import Config
from extproc.doctor.dump_tree import Node, listing, mapping, nodes, number, seconds, type_of, typed
from extproc.doctor.envoy_dump_tls import judge_tls
from extproc.doctor.findings import About, Finding
from extproc.headers import DESTINATION, DESTINATION_NAMESPACE

_MANAGER = ".HttpConnectionManager"
_EXT_PROC = ".ext_proc.v3.ExternalProcessor"
_OVERRIDE = ".OverrideHost"

# Envoy's own, where nothing is set.
DEFAULT_TIMEOUT_SECONDS = 0.2
DEFAULT_BUFFER_BYTES = 1024 * 1024

_DUPLEX = "FULL_DUPLEX_STREAMED"


def judge_envoy(about: About, config: Config, dump: bytes) -> Iterator[Finding]:
    """What is right and wrong with an Envoy.

    dump: the answer of its admin server.
    """
    try:
        raw = msgspec.json.decode(dump)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raw = None
    if not isinstance(raw, Mapping) or not isinstance(raw.get("configs"), list):
        yield about.wrong("envoy-unreadable", "its /config_dump makes no sense")
        return
    # the bootstrap holds the static part a second time
    parts = [one for one in raw["configs"] if not type_of(one).endswith(".BootstrapConfigDump")]
    listeners = [one for one in nodes(parts) if "filter_chains" in one]
    found = [(one, manager) for one in listeners for manager in typed(one, _MANAGER)]
    routes = [one for one in nodes(parts) if isinstance(one.get("virtual_hosts"), list)]
    filtered = [
        finding
        for listener, manager in found
        for ext_proc in typed(manager, _EXT_PROC)
        for finding in (
            *_ext_proc(about, config, ext_proc),
            *judge_tls(about, config, ext_proc, parts),
            *_manager(about, manager),
            *_buffers(about, config, ext_proc, (listener, manager, routes)),
        )
    ]
    has_filter = any(True for _, manager in found for _ in typed(manager, _EXT_PROC))
    faults = list(dict.fromkeys(filtered))
    if not has_filter:
        faults = [about.wrong("envoy-no-ext-proc", "no listener has the filter ext_proc")]
    elif not any(map(_overrides, nodes(parts))):
        says = f"no cluster has override_host by {DESTINATION_NAMESPACE} {DESTINATION}"
        faults.append(about.wrong("envoy-no-override", says))
    yield from faults or [about.right("envoy", "ext_proc, routes and clusters are as they should")]


def _ext_proc(about: About, config: Config, ext_proc: Node) -> Iterator[Finding]:
    timeout = seconds(ext_proc.get("message_timeout"), DEFAULT_TIMEOUT_SECONDS)
    if timeout * 1000 <= config.extproc.deadline_ms:
        says = f"message_timeout is {timeout * 1000:g} ms"
        says += f", and a decision may take {config.extproc.deadline_ms} ms (extproc.deadline_ms)"
        yield about.wrong("envoy-message-timeout", says)
    if not ext_proc.get("failure_mode_allow"):
        says = "failure_mode_allow is false: without the router, requests get 5xx"
        yield about.wrong("envoy-fails-closed", says)
    mode = _mode(ext_proc)
    if mode not in ("BUFFERED", _DUPLEX):
        says = f"request_body_mode is {mode}: the router does not see the prompt"
        yield about.wrong("envoy-body-mode", says)
    if mode == "BUFFERED" and not ext_proc.get("allow_mode_override"):
        says = (
            "allow_mode_override is false: what the router need not read is buffered all the same"
        )
        yield about.wrong("envoy-mode-override", says)
    options = mapping(mapping(ext_proc.get("metadata_options")).get("receiving_namespaces"))
    if DESTINATION_NAMESPACE not in listing(options.get("untyped")):
        says = f"receiving_namespaces lacks {DESTINATION_NAMESPACE}: the pick is dropped"
        yield about.wrong("envoy-namespaces", says)


def _manager(about: About, manager: Node) -> Iterator[Finding]:
    early = manager.get("early_header_mutation_extensions")
    removed = {str(one["remove"]).lower() for one in nodes(early) if "remove" in one}
    if DESTINATION not in removed:
        says = f"a client's own {DESTINATION} is not removed: while the router is away it steers"
        yield about.wrong("envoy-client-header", says)


def _buffers(
    about: About, config: Config, ext_proc: Node, around: tuple[Node, Node, list[Node]]
) -> Iterator[Finding]:
    """Whether bodies that the router would read fit; what is streamed is not held."""
    if _mode(ext_proc) == _DUPLEX:
        return
    listener, manager, routes = around
    default = number(listener.get("per_connection_buffer_limit_bytes"), DEFAULT_BUFFER_BYTES)
    name = mapping(manager.get("rds")).get("route_config_name")
    own = [mapping(manager.get("route_config"))]
    used = own if own[0] else [one for one in routes if one.get("name") == name]
    hosts = [host for one in used for host in listing(one.get("virtual_hosts"))]
    for host in map(mapping, hosts):
        limit = number(host.get("request_body_buffer_limit"), default)
        each = [mapping(one) for one in listing(host.get("routes"))]
        least = min(
            (number(one.get("request_body_buffer_limit"), limit) for one in each), default=limit
        )
        if least < config.extproc.max_body_bytes:
            says = f"virtual host {host.get('name')}: bodies above {least} bytes get 413"
            says += f"; the router reads up to {config.extproc.max_body_bytes}"
            yield about.wrong("envoy-buffer-limit", says)


def _overrides(node: Node) -> bool:
    """Whether a node is what sends a request to the address that the router named."""
    if node.get("type") == "ORIGINAL_DST":
        return True
    if not type_of(node).endswith(_OVERRIDE):
        return False
    sources = [mapping(one) for one in listing(node.get("override_host_sources"))]
    return any(
        str(one.get("header", "")).lower() == DESTINATION
        or mapping(one.get("metadata")).get("key") == DESTINATION_NAMESPACE
        for one in sources
    )


def _mode(ext_proc: Node) -> str:
    return str(mapping(ext_proc.get("processing_mode")).get("request_body_mode", "NONE"))
