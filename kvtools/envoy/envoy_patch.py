"""Adds KVSteer to an existing envoy.yaml, as `kvsteer envoy --patch` prints it.

The additions are built by extproc.envoy.envoy_config, so they are the same as in a complete
configuration. Of the file's own settings, only the load balancing of the workers' cluster changes.
A file is refused if the effect of a change is unclear.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from envoy_data_plane.google.protobuf import Any as Packed

from extproc.base import address
from extproc.base.headers import DESTINATION, DESTINATION_NAMESPACE
from extproc.config.schema import Config
from extproc.config.sections import RING_HASH
from extproc.envoy.envoy_config import (
    FILTER,
    HTTP_OPTIONS,
    ROUTER,
    check_tls,
    circuit_breakers,
    client_headers_removed,
    ext_proc_filter,
    load_balancing,
    oldest,
    outlier_detection,
    retry_policy,
    router_cluster,
    switched_off,
    tree_of,
    worker_http,
)
from extproc.envoy.hashing import session_hashes
from kvtools.envoy.hold_limits import IDLE, MANAGERS_IDLE, low_limits
from kvtools.envoy.path_rewrites import unrecognized
from kvtools.envoy.yaml_edit import KeyPath, YamlText

Tree = dict[str, Any]

# Fields for JSON access logs, if requested: the worker that the router named, who answered,
# and the request's id, by which the router's decision is found.
LOG_FIELDS = {
    "kvsteer_picked": f"%DYNAMIC_METADATA({DESTINATION_NAMESPACE}:{DESTINATION})%",
    "kvsteer_answered": "%UPSTREAM_HOST%",
    "kvsteer_request_id": "%REQ(X-REQUEST-ID)%",
}

# The fallback for each lb_policy. The first three become least request, which suits answers that
# take seconds, and some many times longer than others.
_LEAST_REQUEST = ("LEAST_REQUEST", "ROUND_ROBIN", "RANDOM")
_KEPT = {"RING_HASH": ("ring_hash", "RingHash"), "MAGLEV": ("maglev", "Maglev")}

# Cluster types whose endpoints have addresses that a pick can name.
_TYPES = ("STATIC", "STRICT_DNS", "EDS")

# Route actions for which the cluster depends on the request.
_BY_REQUEST = ("cluster_header", "cluster_specifier_plugin", "inline_cluster_specifier_plugin")

# Conditions in retry_on under which a request is retried on the next worker of a pick.
_WHERE_REFUSED = {"connect-failure", "5xx", "gateway-error", "reset", "reset-before-request"}

# Where a cluster says how it speaks HTTP.
_HTTP_KEYS = (
    "typed_extension_protocol_options",
    "common_http_protocol_options",
    "http_protocol_options",
    "http2_protocol_options",
    "upstream_http_protocol_options",
)

# Limits of requests, in a connection manager and in a route's action.
_MANAGERS_LIMITS = (MANAGERS_IDLE, "common_http_protocol_options")
_ROUTES_LIMITS = (IDLE, "max_stream_duration")

_ROUTER_FILTER = "envoy.filters.http.router"

# How many names of a list a message shows.
_SHOWN = 5


class Patch(NamedTuple):
    """The user's text with KVSteer added, and notes about it, one sentence each."""

    text: str
    notes: list[str]


class PatchOptions(NamedTuple):
    """What to patch if the file leaves a choice; access_log: also add fields to JSON logs."""

    clusters: tuple[str, ...] = ()
    listener: str | None = None
    access_log: bool = False


class _Object(NamedTuple):
    """One JSON object of the file, and its path."""

    path: KeyPath
    tree: Tree


def difference(before: str, after: str, name: str) -> str:
    """Returns a unified diff that `patch` can apply."""
    lines = difflib.unified_diff(_lines(before), _lines(after), name, f"{name} with KVSteer")
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )


def _lines(text: str) -> list[str]:
    return [line for line in re.split(r"(?<=\n)", text) if line]


def patched(text: str, name: str, config: Config, choice: PatchOptions) -> Patch:
    """Returns an envoy.yaml with KVSteer added, or the same text if it is already there.

    name: the file's name, for messages.

    Raises:
        ConfigError: the file or the configuration has something that cannot be patched safely.
    """
    check_tls(config)
    return _Patcher(YamlText(text, name), config, choice).patch()


class _Patcher:
    """Reads one file and edits it."""

    def __init__(self, file: YamlText, config: Config, choice: PatchOptions) -> None:
        self._file, self._config, self._choice = file, config, choice
        self._notes: list[str] = []

    def patch(self) -> Patch:
        """Makes all edits."""
        if self._config.disaggregation.mode is not None:
            self._refuse((), "the configuration has disaggregation; start from `kvsteer envoy`")
        if not isinstance(self._file.value, dict):
            self._refuse((), "is not an envoy.yaml: it must be a mapping")
        root = _Object((), self._file.value)
        static = self._object(root, "static_resources")
        dynamic = self._object(root, "dynamic_resources")
        if static is None:
            self._refuse(
                (),
                "has no static_resources; patch listeners and clusters from xDS at their source",
            )
        managers = self._managers(static, dynamic)
        clusters = self._clusters(static)
        ours = self._workers(managers, clusters, dynamic)
        for name in sorted(ours):
            self._patch_cluster(clusters[name])
        self._tell_what_lacks([clusters[name] for name in sorted(ours)])
        self._add_router(static, clusters)
        for manager in managers:
            if ours & self._led_to(manager):
                self._patch_manager(manager, ours)
        self._tell_what_else()
        return Patch(self._file.edited(), self._notes)

    # ---- reading -------------------------------------------------------------------------------

    def _refuse(self, path: KeyPath, why: str) -> NoReturn:
        self._file.refuse(_place(path), why)

    def _field(self, there: _Object, key: str) -> Any:
        """Returns a field; refuses its JSON name, since the patch would add it a second time."""
        camel = re.sub(r"_(\w)", lambda found: found[1].upper(), key)
        if camel != key and camel in there.tree:
            self._refuse(there.path, f"write {camel} as {key}")
        return there.tree.get(key)

    def _object(self, there: _Object, key: str) -> _Object | None:
        value = self._field(there, key)
        if value is not None and not isinstance(value, dict):
            self._refuse((*there.path, key), "a mapping was expected")
        return None if value is None else _Object((*there.path, key), value)

    def _objects(self, there: _Object, key: str) -> list[_Object]:
        """Returns the members of a list; none if there is no list."""
        value = self._field(there, key)
        path = (*there.path, key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
            self._refuse(path, "a list of mappings was expected")
        return [_Object((*path, number), one) for number, one in enumerate(value)]

    def _typed(self, there: _Object, kind: str) -> _Object | None:
        """Returns an extension's settings if their @type ends with `kind`."""
        settings = self._object(there, "typed_config")
        is_it = settings is not None and _kind(settings.tree).endswith(f".{kind}")
        return settings if is_it else None

    def _managers(self, static: _Object, dynamic: _Object | None) -> list[_Object]:
        wanted = self._choice.listener
        listeners = self._objects(static, "listeners")
        names = [str(one.tree.get("name", "")) for one in listeners]
        if not listeners and dynamic is not None and self._field(dynamic, "lds_config") is not None:
            self._refuse((), "its listeners come from LDS; patch them at their source")
        if wanted is not None and wanted not in names:
            self._refuse((), f"has no listener {wanted!r} but {_names(names)}")
        found = [
            manager
            for listener, name in zip(listeners, names, strict=True)
            if wanted in (None, name)
            for manager in self._managers_of(listener)
        ]
        if not found:
            self._refuse((), "has no static listener with an HttpConnectionManager")
        return found

    def _managers_of(self, listener: _Object) -> Iterator[_Object]:
        default = self._object(listener, "default_filter_chain")
        for chain in (*self._objects(listener, "filter_chains"), *([default] if default else [])):
            for one in self._objects(chain, "filters"):
                if manager := self._typed(one, "HttpConnectionManager"):
                    yield manager

    def _hosts(self, manager: _Object) -> list[_Object]:
        routes = self._object(manager, "route_config")
        return self._objects(routes, "virtual_hosts") if routes else []

    def _led_to(self, manager: _Object) -> set[str]:
        """Returns the clusters that a connection manager's static routes lead to."""
        return {
            name
            for host in self._hosts(manager)
            for route in self._objects(host, "routes")
            for name in self._targets(route) or ()
        }

    def _targets(self, route: _Object) -> set[str] | None:
        """Returns the clusters that a route leads to; None if that depends on the request."""
        action = self._object(route, "route")
        if action is None:
            return set()
        weighted = self._object(action, "weighted_clusters")
        members = self._objects(weighted, "clusters") if weighted else []
        if any(self._field(action, key) is not None for key in _BY_REQUEST):
            return None
        if any("cluster_header" in one.tree for one in members):
            return None
        return {str(one) for one in (action.tree.get("cluster"), *_all(members, "name")) if one}

    def _clusters(self, static: _Object) -> dict[str, _Object]:
        clusters = self._objects(static, "clusters")
        found = {str(one.tree.get("name", "")): one for one in clusters}
        if len(found) < len(clusters):
            self._refuse((*static.path, "clusters"), "two of them have the same name")
        return found

    def _workers(
        self,
        managers: Iterable[_Object],
        clusters: Mapping[str, _Object],
        dynamic: _Object | None,
    ) -> set[str]:
        """Returns the workers' clusters: those requested, else those with workers, or the only one.

        Raises:
            ConfigError: no cluster, or more than one, could be meant.
        """
        for manager in managers:
            if any(self._field(manager, key) is not None for key in ("rds", "scoped_routes")):
                note = "takes its routes from xDS, so it is not changed"
                self._notes.append(f"{_place(manager.path)}: {note}")
        routed = set().union(*map(self._led_to, managers)) - {ROUTER}
        wanted = set(self._choice.clusters) or self._found_workers(routed, clusters)
        for name in sorted(wanted):
            if name not in clusters:
                from_xds = dynamic is not None and self._field(dynamic, "cds_config") is not None
                why = "; clusters from CDS must be patched at their source" if from_xds else ""
                self._refuse((), f"has no static cluster {name!r} but {_names(clusters)}{why}")
            if name not in routed:
                self._refuse((), f"no static route leads to the cluster {name!r}")
        return wanted

    def _found_workers(self, routed: set[str], clusters: Mapping[str, _Object]) -> set[str]:
        if not routed:
            self._refuse((), "has no static route that leads to a cluster")
        endpoints = {one.endpoint for one in self._config.workers}
        known = routed & set(clusters)
        having = {name for name in known if endpoints & self._endpoints(clusters[name])}
        found = having or routed
        if len(found) > (len(self._config.models) if having else 1):
            self._refuse((), _which(found, () if having else sorted(endpoints)))
        return found

    def _endpoints(self, cluster: _Object) -> set[str]:
        load = self._object(cluster, "load_assignment")
        found = set()
        for group in self._objects(load, "endpoints") if load else ():
            for member in self._objects(group, "lb_endpoints"):
                there: _Object | None = member
                for key in ("endpoint", "address", "socket_address"):
                    there = self._object(there, key) if there else None
                if there is not None:
                    host, port = there.tree.get("address"), self._field(there, "port_value")
                    found.add(f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}")
        return found

    # ---- the workers' cluster and the router's ---------------------------------------------------

    def _patch_cluster(self, cluster: _Object) -> None:
        self._check_type(cluster)
        self._balance(cluster)
        missing = {"circuit_breakers": circuit_breakers(), "outlier_detection": outlier_detection()}
        for key, message in missing.items():
            if self._field(cluster, key) is None:
                self._file.put(cluster.path, key, tree_of(message))
        if all(self._field(cluster, key) is None for key in _HTTP_KEYS):
            options = {"@type": f"type.googleapis.com/{HTTP_OPTIONS}", **tree_of(worker_http())}
            self._file.put(cluster.path, _HTTP_KEYS[0], {HTTP_OPTIONS: options})

    def _tell_what_lacks(self, clusters: list[_Object]) -> None:
        if any(self._field(one, "load_assignment") is None for one in clusters):
            return
        known = set().union(*map(self._endpoints, clusters))
        if lacking := {one.endpoint for one in self._config.workers} - known:
            where = _names(str(one.tree["name"]) for one in clusters)
            note = "requests picked for them go elsewhere"
            self._notes.append(f"{_names(lacking)}: not an endpoint of cluster {where}; {note}")

    def _check_type(self, cluster: _Object) -> None:
        custom = self._object(cluster, "cluster_type")
        kind = cluster.tree.get("type", "STATIC") if custom is None else custom.tree.get("name")
        if str(kind).rpartition(".")[2].upper() not in _TYPES:
            why = f"is of the type {kind}, so single endpoints cannot be picked"
            self._refuse(cluster.path, f"{why}; use STRICT_DNS for host names")
        if self._field(cluster, "lb_subset_config") is not None:
            self._refuse(cluster.path, "lb_subset_config cannot be combined with override_host")

    def _balance(self, cluster: _Object) -> None:
        """Sets the load balancing; the cluster's own policy becomes the fallback without a pick."""
        ours = tree_of(load_balancing(self._config))
        settings = _override_in(ours)
        present = self._object(cluster, "load_balancing_policy")
        if present is not None:
            if "OverrideHost" in str(present.tree):
                if not _follows(present.tree, settings):
                    self._refuse(present.path, "already has an override_host with other settings")
                self._tell_of_fallback(present, _override_in(present.tree)["fallback_policy"])
                return
            self._tell_of_fallback(present, present.tree)
            settings["fallback_policy"] = present.tree
            self._file.replace(cluster.path, "load_balancing_policy", "load_balancing_policy", ours)
            return
        policy = str(self._field(cluster, "lb_policy") or "LEAST_REQUEST")
        for key in cluster.tree:
            if re.fullmatch("(ring_hash|maglev|least_request|round_robin)_lb_config", key):
                why = "cannot be combined with override_host; write it as load_balancing_policy"
                self._refuse((*cluster.path, key), why)
        if policy in _KEPT:
            name, kind = _KEPT[policy]
            base = f"envoy.extensions.load_balancing_policies.{name}.v3.{kind}"
            extension = {
                "name": f"envoy.load_balancing_policies.{name}",
                "typed_config": {"@type": f"type.googleapis.com/{base}"},
            }
            settings["fallback_policy"] = {"policies": [{"typed_extension_config": extension}]}
        elif policy not in _LEAST_REQUEST:
            self._refuse((*cluster.path, "lb_policy"), f"{policy} is not supported")
        if "lb_policy" in cluster.tree:
            self._file.replace(cluster.path, "lb_policy", "load_balancing_policy", ours)
        else:
            self._file.put(cluster.path, "load_balancing_policy", ours)

    def _tell_of_fallback(self, there: _Object, theirs: Tree) -> None:
        """Notes that a policy that the cluster has stays its fallback, if another was asked for."""
        wanted = self._config.envoy.fallback
        if wanted == RING_HASH and "RingHash" not in str(theirs):
            note = f"keeps its own fallback, so envoy.fallback: {wanted} is not used; remove it"
            self._notes.append(f"{_place(there.path)} {note}")

    def _add_router(self, static: _Object, clusters: Mapping[str, _Object]) -> None:
        ours = tree_of(router_cluster(self._config))
        present = clusters.get(ROUTER)
        if present is None:
            place = len(self._objects(static, "clusters"))
            comment = f"KVSteer's router. Needs Envoy {oldest(self._config)} or newer."
            self._file.insert((*static.path, "clusters"), place, ours, comment)
        elif not _same(present.tree, ours):
            why = f"a cluster {ROUTER!r} already exists with other settings; remove it"
            self._refuse(present.path, why)

    # ---- connection managers ---------------------------------------------------------------------

    def _patch_manager(self, manager: _Object, ours: set[str]) -> None:
        self._add_filter(manager)
        self._decode_paths(manager, is_alone=self._led_to(manager) <= ours)
        self._remove_headers(manager)
        routes = _Object((*manager.path, "route_config"), manager.tree["route_config"])
        self._check_unset(routes)
        if self._field(routes, "vhds") is not None:
            self._refuse(routes.path, "takes virtual hosts from VHDS")
        for host in self._hosts(manager):
            self._patch_host(manager, host, ours)
        if self._choice.access_log:
            self._add_log_fields(manager)

    def _add_filter(self, manager: _Object) -> None:
        filters = self._objects(manager, "http_filters")
        ours = {"name": FILTER, "typed_config": tree_of(Packed.pack(ext_proc_filter(self._config)))}
        for one in filters:
            if one.tree.get("name") == FILTER:
                if not _same(one.tree, ours):
                    why = "already exists with other settings; remove it, or give it another name"
                    self._refuse(one.path, f"{FILTER} {why}")
                return
            if ROUTER in str(one.tree.get("typed_config")) and self._typed(
                one, "ExternalProcessor"
            ):
                self._refuse(one.path, f"already asks {ROUTER!r} under another name; remove it")
        for place, one in enumerate(filters):
            if one.tree.get("name") == _ROUTER_FILTER or self._typed(
                one, "filters.http.router.v3.Router"
            ):
                comment = "KVSteer picks the worker for each request."
                self._file.insert((*manager.path, "http_filters"), place, ours, comment)
                return
        self._refuse(
            (*manager.path, "http_filters"), f"has no {_ROUTER_FILTER} to put the filter before"
        )

    def _decode_paths(self, manager: _Object, *, is_alone: bool) -> None:
        """Has routes and filters see a path as the engines decode it.

        is_alone: whether all routes lead to workers; others may need escaped slashes as they are.
        """
        if self._field(manager, "normalize_path") is None:
            comment = "Engines decode paths; routes and KVSteer then see the same path."
            self._file.put(manager.path, "normalize_path", value=True, comment=comment)
        elif manager.tree["normalize_path"] is not True:
            note = "sets normalize_path: false, so routes see other paths than the engines"
            self._notes.append(f"{_place(manager.path)} {note}")
        key = "path_with_escaped_slashes_action"
        if is_alone and self._field(manager, key) is None:
            self._file.put(manager.path, key, "UNESCAPE_AND_FORWARD")

    def _remove_headers(self, manager: _Object) -> None:
        key = "early_header_mutation_extensions"
        ours = tree_of(client_headers_removed(self._config))
        present = self._objects(manager, key)
        removed = {
            str(mutation.tree.get("remove")).lower()
            for one in present
            if (settings := self._typed(one, "HeaderMutation"))
            for mutation in self._objects(settings, "mutations")
        }
        if {one["remove"] for one in ours["typed_config"]["mutations"]} <= removed:
            return
        comment = "Clients must not steer: their own copies of these headers are removed."
        if self._field(manager, key) is None:
            self._file.put(manager.path, key, [ours], comment)
        else:
            self._file.insert((*manager.path, key), len(present), ours, comment)

    def _patch_host(self, manager: _Object, host: _Object, ours: set[str]) -> None:
        if self._field(host, "matcher") is not None:
            self._refuse(host.path, "chooses routes by a matcher, which is not supported")
        routes = self._objects(host, "routes")
        led = [self._targets(route) for route in routes]
        if all(targets is not None and not targets & ours for targets in led):
            if routes:
                self._switch_off(host)
            return
        self._check_unset(host)
        for route, targets in zip(routes, led, strict=True):
            if targets is None:
                note = "chooses its cluster by the request, so its requests ask KVSteer too"
                self._notes.append(f"{_place(route.path)} {note}")
            elif targets & ours:
                self._check_unset(route)
                self._serve(host, route)
                self._let_wait(manager, _Object((*route.path, "route"), route.tree["route"]))
            else:
                self._switch_off(route)

    def _switch_off(self, there: _Object) -> None:
        """Switches the filter off for a virtual host or a route."""
        key = "typed_per_filter_config"
        present = self._object(there, key)
        comment = "These requests do not go to KVSteer's workers."
        if present is None:
            self._file.put(there.path, key, {FILTER: tree_of(switched_off())}, comment)
        elif FILTER not in present.tree:
            self._file.put(present.path, FILTER, tree_of(switched_off()), comment)
        elif not _is_off(present.tree[FILTER]):
            self._refuse((*present.path, FILTER), "is already set, with other settings")

    def _check_unset(self, there: _Object) -> None:
        present = self._object(there, "typed_per_filter_config")
        if present is not None and FILTER in present.tree:
            self._refuse((*present.path, FILTER), "is set on routes to the workers")

    def _serve(self, host: _Object, route: _Object) -> None:
        """Lets a route to the workers buffer long prompts, and retry on a pick's next worker."""
        action = _Object((*route.path, "route"), route.tree["route"])
        match = self._object(route, "match")
        rewritten = unrecognized(match.tree if match else {}, action.tree, self._config)
        if rewritten:
            self._notes.append(f"{_place(action.path)}: {rewritten}")
        limit = "request_body_buffer_limit"
        if self._field(route, limit) is None and self._field(host, limit) is None:
            size = self._config.envoy.request_body_buffer_limit_bytes
            self._file.put(
                route.path, limit, size, "The largest prompt, in bytes. Envoy's default is 1 MiB."
            )
        present = self._object(action, "retry_policy") or self._object(host, "retry_policy")
        if present is None:
            self._file.put(action.path, "retry_policy", tree_of(retry_policy()))
        elif not _WHERE_REFUSED & set(re.split(r"[\s,]+", str(self._field(present, "retry_on")))):
            note = "does not retry on connect-failure: requests to a worker that just died fail"
            self._notes.append(f"{_place(present.path)} {note}")
        hashes = [tree_of(one) for one in session_hashes(self._config)]
        if hashes and self._field(action, "hash_policy") is None:
            comment = "Without a pick, requests of one session go to one worker."
            self._file.put(action.path, "hash_policy", hashes, comment)
        if self._field(action, "timeout") is None:
            note = "has no timeout, so Envoy's default of 15 s applies; generations may take longer"
            self._notes.append(f"{_place(action.path)} {note}")

    def _let_wait(self, manager: _Object, action: _Object) -> None:
        """Lets the requests of a route wait in the router as long as it may hold them."""
        hold = self._config.policy.hold
        if not hold.enabled:
            return
        for there, keys in ((manager, _MANAGERS_LIMITS), (action, _ROUTES_LIMITS)):
            for key in keys:
                self._field(there, key)
        needed = hold.envoy_seconds
        for low in low_limits(manager.tree, action.tree, needed):
            if low.key == MANAGERS_IDLE:
                comment = "Requests may wait in KVSteer (policy.hold)."
                self._file.put(action.path, IDLE, f"{needed}s", comment)
                continue
            where = action.path if low.is_of_route else manager.path
            note = f"its {low.key} of {low.seconds:g} s ends requests that may wait for {needed} s"
            self._notes.append(f"{_place(where)}: {note} (policy.hold)")

    # ---- access logs -----------------------------------------------------------------------------

    def _add_log_fields(self, manager: _Object) -> None:
        """Adds fields to JSON logs only: a new column in a text would break its readers."""
        found = 0
        for log in self._objects(manager, "access_log"):
            settings = self._object(log, "typed_config")
            form = self._object(settings, "log_format") if settings else None
            for there in filter(None, (form, settings)):
                if (fields := self._object(there, "json_format")) is not None:
                    found += 1
                    self._add_fields(fields)
        if not found:
            note = f"has no JSON access log; to a text format, add {LOG_FIELDS['kvsteer_picked']}"
            self._notes.append(f"{_place(manager.path)} {note}")

    def _add_fields(self, there: _Object) -> None:
        for key, value in LOG_FIELDS.items():
            if key not in there.tree and value not in there.tree.values():
                self._file.put(there.path, key, value)

    def _tell_what_else(self) -> None:
        if len(self._config.models) > 1:
            note = "several models: your own routes must lead each model's requests to its cluster"
            self._notes.append(note)
        if self._config.envoy.eds_directory is not None:
            note = "envoy.eds_directory is not used: your cluster keeps its own endpoints"
            self._notes.append(note)
        self._tell_of_containers()

    def _tell_of_containers(self) -> None:
        """Notes a router on loopback beside workers whose names look like those of containers."""
        router = self._config.router_addresses()[0]
        if router.startswith(address.UNIX_PREFIX):
            return
        workers = (address.parse(one.endpoint) for one in self._config.workers)
        has_names = any(
            not (at.is_ip or at.host == "localhost" or "." in at.host) for at in workers
        )
        if has_names and address.is_loopback(address.parse(router).host):
            note = f"Envoy asks the router at {router}, which is Envoy's own host or container"
            self._notes.append(f"{note}: if the router runs elsewhere, set envoy.router")


def _kind(settings: Tree) -> str:
    return str(settings.get("@type", ""))


def _override_in(policy: Tree) -> Tree:
    """Returns the settings of the override in a load_balancing_policy that KVSteer wrote."""
    (only,) = policy["policies"]
    settings: Tree = only["typed_extension_config"]["typed_config"]
    return settings


def _follows(present: Tree, ours: Tree) -> bool:
    """Tells whether a policy follows the pick as KVSteer's does, whatever its fallback."""
    try:
        theirs = _override_in(present)
        if "selected_host_key" not in ours:
            theirs = {key: one for key, one in theirs.items() if key != "selected_host_key"}
        return _same({**theirs, "fallback_policy": 0}, {**ours, "fallback_policy": 0})
    except (KeyError, TypeError, ValueError, AttributeError):
        return False


def _is_off(settings: object) -> bool:
    return isinstance(settings, dict) and settings.get("disabled") is True


def _all(members: Iterable[_Object], key: str) -> list[Any]:
    return [one.tree.get(key) for one in members]


def _same(theirs: object, ours: object) -> bool:
    """Tells whether settings are equal; 0.5s equals 0.500s, and 80 equals "80"."""
    return _plain(theirs) == _plain(ours)


def _plain(value: object) -> object:
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    text = str(value).lower() if isinstance(value, bool) else str(value)
    number = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)(s?)", text)
    return (float(number[1]), number[2]) if number else text


def _place(path: KeyPath) -> str:
    """Returns a path in the form a.b[0].c."""
    steps = [f"[{one}]" if isinstance(one, int) else f".{one}" for one in path]
    return "".join(steps).removeprefix(".")


def _names(names: Iterable[str]) -> str:
    """Returns the first names for a message, and how many more there are."""
    found = sorted(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(one[:80] for one in found[:_SHOWN]) + more or "none"


def _which(found: Collection[str], strangers: Sequence[str]) -> str:
    """Returns the question which of these clusters has the workers.

    strangers: the addresses of the configured workers, if no cluster has any of them.
    """
    if not strangers:
        return f"which cluster has the workers: {_names(found)}? Use --cluster NAME"
    return (
        f"no cluster has the address of a configured worker ({', '.join(strangers[:3])}): correct"
        f" `workers`, or name the workers' cluster with --cluster NAME: {_names(found)}"
    )
