"""Envoy's `GET /config_dump`, held against what the router needs of it.

Source: `envoy.admin.v3.ConfigDump` as JSON: durations as "0.5s", 64-bit numbers as text, defaults
left out. What each setting is for is told in envoy/envoy.yaml.
"""

from collections.abc import Iterator, Mapping

import msgspec

from extproc.config import Config
from extproc.doctor.dump_tree import Node, listing, mapping, nodes, seconds, type_of, typed
from extproc.doctor.envoy_dump_clusters import (
    Hosts,
    judge_hosts,
    judge_router_cluster,
    overrides,
    steered,
)
from extproc.doctor.envoy_dump_routes import Around, judge_buffers, judge_routes
from extproc.doctor.findings import About, Finding
from extproc.headers import DESTINATION, DESTINATION_NAMESPACE

_MANAGER = ".HttpConnectionManager"
_EXT_PROC = ".ext_proc.v3.ExternalProcessor"

# Envoy's own, where nothing is set.
DEFAULT_TIMEOUT_SECONDS = 0.2

_DUPLEX = "FULL_DUPLEX_STREAMED"


def judge_envoy(
    about: About, config: Config, dump: bytes, hosts: Hosts, workers: Mapping[str, str]
) -> Iterator[Finding]:
    """What is right and wrong with an Envoy.

    dump: the answer of its admin server. hosts: of its clusters. workers: as in `judge_hosts`.
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
    found = dict.fromkeys(
        (
            *_filters(about, config, parts, hosts),
            *judge_hosts(about, parts, hosts, workers),
        )
    )
    says = "ext_proc, routes and clusters are configured correctly"
    yield from found or [about.right("envoy", says)]


def _filters(about: About, config: Config, parts: object, hosts: Hosts) -> Iterator[Finding]:
    """What is wrong with the filters that ask the router, and with what is around them."""
    apart = [one for one in nodes(parts) if isinstance(one.get("virtual_hosts"), list)]
    names = steered(parts).keys()
    listeners = [one for one in nodes(parts) if "filter_chains" in one]
    managers = [(one, manager) for one in listeners for manager in typed(one, _MANAGER)]
    has_filter = False
    for listener, manager in managers:
        for one in map(mapping, listing(manager.get("http_filters"))):
            around = Around(str(one.get("name", "")), listener, manager, apart, names)
            for ext_proc in typed(one, _EXT_PROC):
                has_filter = True
                yield from _ext_proc(about, config, ext_proc)
                yield from judge_router_cluster(about, config, ext_proc, parts, hosts)
                yield from _manager(about, manager)
                yield from judge_routes(about, around)
                if _mode(ext_proc) != _DUPLEX:
                    yield from judge_buffers(about, config, around)
    if not has_filter:
        yield about.wrong("envoy-no-ext-proc", "no listener has the filter ext_proc")
    elif not any(map(overrides, nodes(parts))):
        says = f"no cluster has override_host by {DESTINATION_NAMESPACE} {DESTINATION}"
        yield about.wrong("envoy-no-override", says)


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
    yield from _responses(about, config, mapping(ext_proc.get("processing_mode")))


def _responses(about: About, config: Config, mode: Node) -> Iterator[Finding]:
    """Whether the router sees of responses what it needs: their end, and what is accounted for."""
    if mode.get("response_trailer_mode") != "SEND" and mode.get("response_body_mode") is None:
        says = "response_trailer_mode is not SEND: Envoy 1.40 tells the router when a response ends"
        says += " all the same; where one does not, load is counted until the pick only"
        yield about.note("envoy", says)
    wanted = config.accounting.responses
    if wanted != "none" and mode.get("response_header_mode") == "SKIP":
        says = f"accounting.responses is {wanted}, and response_header_mode is SKIP: the router"
        yield about.wrong("envoy-response-headers", f"{says} sees no responses")


def _manager(about: About, manager: Node) -> Iterator[Finding]:
    early = manager.get("early_header_mutation_extensions")
    removed = {str(one["remove"]).lower() for one in nodes(early) if "remove" in one}
    if DESTINATION not in removed:
        says = f"a client's own {DESTINATION} is not removed: while the router is away it steers"
        yield about.wrong("envoy-client-header", says)


def _mode(ext_proc: Node) -> str:
    return str(mapping(ext_proc.get("processing_mode")).get("request_body_mode", "NONE"))
