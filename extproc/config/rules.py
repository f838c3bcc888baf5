"""Rules between the keys of a configuration, and about where its routers and Envoy listen and meet.

`broken_rules` finds faults; `doubts` finds unusual settings, which are accepted with a note. The
rules about workers are in `extproc.config.fleet_rules`.
"""

import contextlib
import ipaddress
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from extproc.base import address
from extproc.base.template_arguments import RESERVED_ARGUMENTS
from extproc.config.feature_doubts import feature_doubts, is_discovered
from extproc.config.feed_kinds import KINDS
from extproc.config.fleet_rules import (
    AT_LEAST_ONE,
    address_fault,
    fleet_faults,
    parse_publisher,
)
from extproc.config.owned_headers import RESERVED
from extproc.config.policies import POLICIES, header_keys
from extproc.config.schema import (
    UNREAD,
    USAGE,
    Config,
    Envoy,
    FoundWorker,
    Model,
    WorkerEvents,
    WorkerSettings,
)
from extproc.config.sections import (
    BOTH,
    CONVERSATION,
    DECODE,
    MAX_WARM_MODELS,
    MIRROR,
    NIXL,
    OFFLOADING,
    PREFILL,
    RING_HASH,
    SGLANG,
    STANDBY,
    ClassSettings,
    SharingSettings,
    StoreSettings,
    session_headers,
)
from extproc.config.wrong_keys import until_wrong
from kvstate.overlap import Tier, tier_of

# A valid name for a header that the router asks a proxy to set (RFC 9110, section 5.1).
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

# A name in a header's list of name=share.
_IN_LIST = re.compile("[!-+./-<>-~-]+")

# Most prefixes of paths, which each unusual path is compared with, and their longest length.
MAX_PATH_PREFIXES = 256
MAX_PREFIX_CHARACTERS = 256

# Longest name of a header that names a conversation.
_HEADER_CHARACTERS = 256

# Valid names of routers, and their longest length, as in messages between routers.
_ROUTER_NAME = re.compile(r"[!-~]+")
_NAME_CHARACTERS = 64

# Longest file name of a datagram socket in a directory.
_SOCKET_NAME_BYTES = 32

# Headers that requests need, or that KVSteer sets.
_TAKEN = frozenset({
    "host", "content-length", "content-type", "transfer-encoding", "connection", "authorization",
}) | RESERVED  # fmt: skip


def broken_rules(config: Config) -> list[str]:
    """Returns every broken rule as "key: what is wrong", as far as no wrong key is read."""
    return [
        *listener_faults(config),
        *fleet_faults(config),
        *(fault for rule in _RULES for fault in until_wrong(rule, config)),
    ]


def _deadline(config: Config) -> Iterator[str]:
    timeout_ms = config.envoy.message_timeout_ms
    if config.extproc.deadline_ms >= timeout_ms:
        yield f"extproc.deadline_ms: must be below envoy.message_timeout_ms ({timeout_ms})"


def _body_limit(config: Config) -> Iterator[str]:
    limit_bytes = config.envoy.request_body_buffer_limit_bytes
    if config.extproc.max_body_bytes > limit_bytes:
        yield (
            "extproc.max_body_bytes: must not be above"
            f" envoy.request_body_buffer_limit_bytes ({limit_bytes}): Envoy answers 413 above it"
        )


def _warm_models(config: Config) -> Iterator[str]:
    models, names = config.policy.warm_models, {model.name for model in config.models}
    for number, name in enumerate(models):
        if name not in names:
            yield f"policy.warm_models[{number}]: {name!r} is the name of no model"
        elif name in models[:number]:
            yield f"policy.warm_models[{number}]: {name!r} is there twice"
        elif not _IN_LIST.fullmatch(name):
            yield f"policy.warm_models[{number}]: {name!r} cannot be a name in a header's list"
    if len(models) > MAX_WARM_MODELS:
        yield f"policy.warm_models: more than {MAX_WARM_MODELS}"


def _time_of_warm_models(config: Config) -> Iterator[str]:
    """Yields a fault if Envoy may not wait until all models are asked, the request's own too."""
    models, timeout_ms = config.policy.warm_models, config.envoy.message_timeout_ms
    count = len(models) + any(one.name not in models for one in config.models)
    if models and count * config.extproc.deadline_ms >= timeout_ms:
        yield (
            f"policy.warm_models: a request may be tokenized for {count} models in turn, so"
            f" {count} times extproc.deadline_ms must be below envoy.message_timeout_ms"
            f" ({timeout_ms})"
        )


def _shedding(config: Config) -> Iterator[str]:
    if config.policy.shed and config.policy.max_in_flight is None:
        yield "policy.max_in_flight: missing, but policy.shed needs it"


def _path_prefixes(config: Config) -> Iterator[str]:
    prefixes = config.extproc.path_prefixes
    if len(prefixes) > MAX_PATH_PREFIXES:
        yield f"extproc.path_prefixes: more than {MAX_PATH_PREFIXES}"
    for number, prefix in enumerate(prefixes):
        yield from _path_prefix(f"extproc.path_prefixes[{number}]", prefix)


def _path_prefix(key: str, prefix: str) -> Iterator[str]:
    whole = prefix.removesuffix("/")
    if not prefix.startswith("/") or not whole:
        yield f"{key}: must begin with / and have more than that, is {prefix[:60]!r}"
    elif len(prefix) > MAX_PREFIX_CHARACTERS:
        yield f"{key}: longer than {MAX_PREFIX_CHARACTERS} characters"
    elif not set("?#%*").isdisjoint(prefix) or "//" in prefix:
        yield f"{key}: must be a path as engines see it, without ?, #, %, * and //: {prefix[:60]!r}"
    elif f"{whole}/".startswith("/v1/"):
        yield f"{key}: /v1 is the beginning of an engine's own paths, is {prefix[:60]!r}"


def _header_names(config: Config) -> Iterator[str]:
    keys = ("policy.header", "policy.session_header", "policy.rank_header", "steering.header")
    for key in (*keys, *[f"policy.{one}" for one in header_keys()]):
        yield from until_wrong(_header_name, config, key)


def _header_name(config: Config, key: str) -> Iterator[str]:
    named = attrgetter(key)(config)
    for name in (named,) if isinstance(named, str) else named or ():
        if not _HEADER.fullmatch(name):
            yield f"{key}: is not a valid header name: {name!r}"


def _session_header(config: Config) -> Iterator[str]:
    policy, sessions = config.policy, config.policy.session_header
    for name in (sessions,) if isinstance(sessions, str) else sessions or ():
        if name.lower() == (policy.header or "").lower():
            yield f"policy.session_header: {name!r} is already used as policy.header"


def _policy_headers(config: Config) -> Iterator[str]:
    """Yields a fault for each policy that is named, but reads a header that is not."""
    used = {config.policy.name, *[model.policy for model in config.models]}
    for name, one in POLICIES.items():
        key = one.reads_header
        if key and name in used and attrgetter(key)(config.policy) is None:
            yield f"policy.{key}: missing; the policy {name} needs it"


def _template_arguments(config: Config) -> Iterator[str]:
    for number, model in enumerate(config.models):
        where = f"models[{number}].chat_template_kwargs"
        yield from until_wrong(_reserved_arguments, where, model)


def _reserved_arguments(where: str, model: Model) -> Iterator[str]:
    for name in sorted(RESERVED_ARGUMENTS & (model.chat_template_kwargs or {}).keys()):
        yield f"{where}.{name}: is no argument of a template, but of the library that runs it"


def _rank_header(config: Config) -> Iterator[str]:
    policy = config.policy
    name = (policy.rank_header or "").lower()
    if name in _TAKEN:
        yield f"policy.rank_header: {policy.rank_header!r} is a reserved header"
    elif name and name == (policy.header or "").lower():
        yield f"policy.rank_header: {policy.rank_header!r} is already used as policy.header"


def _steered(config: Config) -> Iterator[str]:
    yield from config.steering.faults(config.disaggregation)


def _tenant_header(config: Config) -> Iterator[str]:
    if config.isolation is None:
        return
    header = config.isolation.header
    if not _HEADER.fullmatch(header):
        yield f"isolation.header: is not a valid header name: {header!r}"
    elif header.lower() in _TAKEN - {"authorization"}:
        yield f"isolation.header: {header!r} is a reserved header"


def _shared_models(config: Config) -> Iterator[str]:
    share = config.isolation.share if config.isolation else ()
    names = {model.name for model in config.models}
    for number, name in enumerate(share):
        if name not in names:
            yield f"isolation.share[{number}]: {name!r} is the name of no model"


def _salted_bodies(config: Config) -> Iterator[str]:
    if config.isolation is not None and config.extproc.dialect == "epp":
        yield "isolation: needs bodies that can be changed: dialect buffered"


def _recording(config: Config) -> Iterator[str]:
    name = config.recorder.tenant_header
    if name is None:
        return
    if not _HEADER.fullmatch(name):
        yield f"recorder.tenant_header: is not a valid header name: {name!r}"
    elif config.isolation is not None:
        yield "recorder.tenant_header: isolation.header names the tenants already"


def _stores(config: Config) -> Iterator[str]:
    names = Counter(_names(config.stores))
    yield from (f"stores: the name {one!r} is used twice" for one in names if names[one] > 1)
    for number, one in enumerate(config.stores):
        for rule in (_workers_of_store, _media_of_store, _publisher_of_store):
            yield from until_wrong(rule, f"stores[{number}]", one)


def _several_stores(config: Config) -> Iterator[str]:
    if len(config.stores) > 1 and any(one.workers is None for one in config.stores):
        yield "stores: with several, each needs a list of its workers"


def _mounts(config: Config) -> Iterator[str]:
    mounts = Counter(
        worker
        for store in config.stores
        for worker in until_wrong(lambda store: store.workers or (), store)
    )
    for worker, count in mounts.items():
        if count > 1:
            yield f"stores: {worker!r} mounts more than one store"


def _names(items: Iterable[StoreSettings | ClassSettings]) -> Iterator[str]:
    """Yields the names of a list's items, of those that have right ones."""
    for item in items:
        yield from until_wrong(lambda item: [item.name], item)


def _workers_of_store(key: str, store: StoreSettings) -> Iterator[str]:
    if store.workers is None and (store.media or store.zmq):
        yield f"{key}: with media or zmq it needs a list of its workers"


def _media_of_store(key: str, store: StoreSettings) -> Iterator[str]:
    for medium in store.media:
        tier = tier_of(medium)
        if tier is None or tier is Tier.DEVICE:
            yield f"{key}.media: {medium!r} is no medium of a store"


def _publisher_of_store(key: str, store: StoreSettings) -> Iterator[str]:
    if store.zmq is not None:
        yield from address_fault(f"{key}.zmq", store.zmq, parse_publisher)


def _class_header(config: Config) -> Iterator[str]:
    rules = config.policy.classes
    if rules is None:
        return
    if not _HEADER.fullmatch(rules.header):
        yield f"policy.classes.header: is not a valid header name: {rules.header!r}"
    elif rules.header.lower() in _TAKEN:
        yield f"policy.classes.header: {rules.header!r} is a reserved header"


def _class_names(config: Config) -> Iterator[str]:
    rules = config.policy.classes
    if rules is None:
        return
    names = Counter(_names(rules.of))
    for name, count in names.items():
        if count > 1:
            yield f"policy.classes.of: the name {name!r} is used {count} times"
    if len({one.name for one in rules.of}) < 2:
        yield "policy.classes.of: two classes are the least"


def _class_default(config: Config) -> Iterator[str]:
    rules = config.policy.classes
    names = {one.name for one in rules.of} if rules else set()
    if rules and names and rules.default not in names:
        yield f"policy.classes.default: {rules.default!r} is the name of no class"


def _held_classes(config: Config) -> Iterator[str]:
    rules = config.policy.classes
    known = [] if rules is None else [one.name for one in rules.of]
    for name in config.policy.hold.classes:
        if name not in known:
            yield f"policy.hold.classes: {name!r} is the name of no class"


def _counted_tokens(config: Config) -> Iterator[str]:
    if config.policy.hand_tokens.enabled and config.accounting.responses != USAGE:
        yield (
            f"policy.hand_tokens.enabled: needs accounting.responses: {USAGE}, to compare counts"
        )


def _told_misses(config: Config) -> Iterator[str]:
    if not config.misses.response_headers:
        return
    if not config.misses.enabled:
        yield "misses.response_headers: needs misses.enabled: true"
    if config.accounting.responses == UNREAD:
        yield "misses.response_headers: needs accounting.responses: headers or usage, to change any"


def _priced_pulls(config: Config) -> Iterator[str]:
    rules = config.disaggregation
    if rules.price_pulls and rules.min_pulled_tokens is None:
        yield "disaggregation.min_pulled_tokens: missing, but disaggregation.price_pulls needs it"


def _pulls(config: Config) -> Iterator[str]:
    if config.disaggregation.min_pulled_tokens is not None:
        yield from until_wrong(_pulling_connector, config)
        yield from until_wrong(_pulling_bodies, config)


def _pulling_connector(config: Config) -> Iterator[str]:
    if config.disaggregation.connector != OFFLOADING:
        yield "disaggregation.min_pulled_tokens: needs disaggregation.connector: offloading"


def _pulling_bodies(config: Config) -> Iterator[str]:
    if config.disaggregation.mode is None and config.extproc.dialect == "epp":
        yield (
            "disaggregation.min_pulled_tokens: needs bodies that can be changed (dialect"
            " buffered), or a sidecar (disaggregation.mode: header)"
        )


def _mirror(config: Config) -> Iterator[str]:
    if config.disaggregation.mode == MIRROR:
        yield from until_wrong(_mirroring_connector, config)
        yield from until_wrong(_mirrored_bodies, config)


def _mirroring_connector(config: Config) -> Iterator[str]:
    if config.disaggregation.connector == NIXL:
        yield (
            "disaggregation.connector: nixl needs mode header: its second request says what the"
            " first one answered"
        )


def _mirrored_bodies(config: Config) -> Iterator[str]:
    if config.extproc.dialect == "epp":
        yield "disaggregation.mode: mirror needs bodies that can be changed: dialect buffered"


def _models(config: Config) -> Iterator[str]:
    if not config.models:
        yield f"models: {AT_LEAST_ONE}"
    names = [
        (f"models[{position}]", name)
        for position, model in enumerate(config.models)
        for name in until_wrong(_names_of_model, model)
    ]
    uses = Counter(name for _, name in names)
    seen: set[str] = set()
    for key, name in names:
        if uses[name] > 1 and name not in seen:
            seen.add(name)
            yield f"{key}: the name {name!r} is used {uses[name]} times"


def _names_of_model(model: Model) -> Iterator[str]:
    yield model.name
    yield from until_wrong(lambda: model.aliases)
    yield from model.lora


_MODE = re.compile("0?[0-7]{3}")

_WILDCARDS = {4: "0.0.0.0", 6: "::"}


_HOST_NAME = re.compile("[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_.])?", re.IGNORECASE)


def _is_host(text: str) -> bool:
    return address.Address(text, 0).is_ip or _HOST_NAME.fullmatch(text) is not None


def listener_faults(config: Config) -> Iterator[str]:
    """Yields the faults of the addresses on which the router and Envoy listen."""
    for key, faults in (
        ("extproc.listen", _socket_or_address),
        ("admin.listen", _plain_address),
        ("metrics.listen", _plain_address),
        ("probe.listen", _plain_address),
        ("envoy.listen", _address_of_envoy),
        ("envoy.admin", _address_of_envoy),
    ):
        for _, text in _address_at(config, key):
            yield from faults(key, text)
    for rule in (
        _admin_hosts,
        _addresses_of_routers,
        _one_router_or_several,
        _several,
        _conversation_headers,
        _hashed_headers,
        _socket_mode,
        _tls_of_socket,
        _router_tls,
        _processes,
        _feeds_of_processes,
        _listeners_on_one_address,
    ):
        yield from until_wrong(rule, config)


def _plain_address(key: str, text: str) -> Iterator[str]:
    yield from address_fault(key, text, address.parse)


def _address_of_envoy(key: str, text: str) -> Iterator[str]:
    yield from address_fault(key, text, _parse_listener)


def _address_at(config: Config, *keys: str) -> Iterator[tuple[str, str]]:
    """Yields keys with their addresses, unless they are wrong, or their section is left out."""
    for key in keys:
        yield from until_wrong(_address_of, config, key)


def _address_of(config: Config, key: str) -> Iterator[tuple[str, str]]:
    name, _, listen = key.partition(".")
    section = getattr(config, name)
    if section is not None:
        yield key, getattr(section, listen)


def _admin_hosts(config: Config) -> Iterator[str]:
    for number, host in enumerate(config.admin.hosts):
        if not _is_host(host):
            yield f"admin.hosts[{number}]: {host!r} is no host: want a name or address, no port"


def _addresses_of_routers(config: Config) -> Iterator[str]:
    for key, text in _routers(config):
        yield from _socket_or_address(key, text)


def _socket_mode(config: Config) -> Iterator[str]:
    mode = config.extproc.socket_mode
    if not _MODE.fullmatch(mode):
        yield f'extproc.socket_mode: must be a mode such as "0660", is {mode!r}'


def _processes(config: Config) -> Iterator[str]:
    """Yields the addresses that not every one of several processes can have."""
    count = config.extproc.processes
    if count == 1:
        return
    for key, text in (*_listeners(config), *until_wrong(_routers, config)):
        try:
            last = address.nth(text, count - 1)
        except ValueError as error:
            yield f"{key}: {error}"
        else:
            if last.startswith(address.UNIX_PREFIX):
                yield from _socket_or_address(key, last)


def _feeds_of_processes(config: Config) -> Iterator[str]:
    """Yields the feeds that several processes cannot share, since they allow only one reader."""
    if config.extproc.processes > 1:
        for position, worker in enumerate(config.workers):
            yield from until_wrong(_feed_of_one, f"workers[{position}].events", worker, config)


def _feed_of_one(key: str, worker: WorkerSettings, config: Config) -> Iterator[str]:
    if isinstance(worker.events, WorkerEvents):
        consumed = [one.key for one in KINDS if one.is_consumed and getattr(worker.events, one.key)]
        for name in consumed or (["bind"] if worker.events.bind else []):
            yield (
                f"{key}.{name}: cannot be shared by {config.extproc.processes} processes"
                " (extproc.processes): put `kvsteer bridge` in between"
            )


def _routers(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the configured addresses of the router or routers for Envoy, with their keys."""
    envoy = config.envoy
    if envoy.router is not None:
        yield "envoy.router", envoy.router
    for position, text in enumerate(envoy.routers.addresses if envoy.routers else ()):
        yield f"envoy.routers.addresses[{position}]", text


def _one_router_or_several(config: Config) -> Iterator[str]:
    if config.envoy.routers is not None and config.envoy.router is not None:
        yield "envoy.routers: cannot be used together with envoy.router: remove one of the two"


def _several(config: Config) -> Iterator[str]:
    routers = config.envoy.routers
    if routers is None:
        return
    if not routers.addresses:
        yield "envoy.routers.addresses: needs at least one"
    twice = {text for text in routers.addresses if routers.addresses.count(text) > 1}
    yield from (f"envoy.routers.addresses: {text} is given twice" for text in sorted(twice))
    if routers.choice == STANDBY and len(routers.addresses) == 1:
        yield "envoy.routers.choice: standby needs two or more addresses, in order"


def _conversation_headers(config: Config) -> Iterator[str]:
    routers = config.envoy.routers
    if routers is None:
        return
    for name in routers.conversation_headers:
        if not (_HEADER.fullmatch(name) and len(name) <= _HEADER_CHARACTERS):
            yield f"envoy.routers.conversation_headers: {name!r} is no header's name"
    if routers.choice == CONVERSATION and not routers.conversation_headers:
        yield "envoy.routers.conversation_headers: choice conversation needs at least one"


def _hashed_headers(config: Config) -> Iterator[str]:
    if config.envoy.fallback == RING_HASH and not session_headers(config.policy.session_header):
        yield "envoy.fallback: ring_hash needs a header that names a session: policy.session_header"


def _listeners(config: Config) -> Iterator[tuple[str, str]]:
    return _address_at(config, "extproc.listen", "admin.listen", "metrics.listen", "probe.listen")


def _all_listeners(config: Config) -> Iterator[tuple[str, str]]:
    """Yields the listening addresses of every process, with their keys."""
    yield from _listeners(config)
    for number in until_wrong(lambda: range(1, config.extproc.processes)):
        for key, text in _listeners(config):
            with contextlib.suppress(ValueError):
                yield f"{key} of process {number}", address.nth(text, number)


def _socket_or_address(key: str, text: str) -> Iterator[str]:
    if text.startswith("/"):
        yield f"{key}: must be host:port or unix:PATH, is {text!r}; did you mean unix:{text}?"
        return
    if not text.startswith(address.UNIX_PREFIX):
        yield from address_fault(key, text, address.parse)
        return
    # gRPC also writes unix:///absolute/path.
    path = text.removeprefix(address.UNIX_PREFIX).removeprefix("//")
    size = len(path.encode())
    if not path:
        yield f"{key}: unix: needs a path"
    elif size > address.MAX_PATH_BYTES:
        yield f"{key}: the socket's path has {size} bytes; the limit is {address.MAX_PATH_BYTES}"


def _parse_listener(text: str) -> None:
    place = address.parse(text)
    if not place.is_ip and place.host != "localhost":
        raise ValueError(f"must be ip:port, since Envoy cannot listen on a host name, is {text!r}")


def _tls_of_socket(config: Config) -> Iterator[str]:
    if config.extproc.tls is not None and config.extproc.listen.startswith(address.UNIX_PREFIX):
        yield "extproc.tls: listen must be host:port; for a Unix socket set extproc.socket_mode"


def _router_tls(config: Config) -> Iterator[str]:
    theirs = config.envoy.router_tls
    if theirs is None:
        return
    if (theirs.certificate is None) != (theirs.key is None):
        yield "envoy.router_tls: certificate and key belong together"
    elif theirs.certificate is None and config.extproc.tls and config.extproc.tls.client_ca:
        yield "envoy.router_tls: needs certificate and key: extproc.tls.client_ca requires them"


def _listeners_on_one_address(config: Config) -> Iterator[str]:
    """Yields a fault for each address that two servers would listen on."""
    ours = [*_all_listeners(config)]
    theirs = [*_address_at(config, "envoy.listen", "envoy.admin")]
    together = [*ours, *until_wrong(_on_one_host, config, theirs)]
    yield from dict.fromkeys((*clashes(ours), *clashes(theirs), *clashes(together)))


def _on_one_host(config: Config, theirs: list[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yields those of Envoy's addresses that are compared with the router's.

    That is, if both are known to run on one host, those that are not defaults: Envoy may run with
    another configuration.
    """
    if any(_listens_on_loopback(text) for text in config.router_addresses()):
        usual = {"envoy.listen": Envoy().listen, "envoy.admin": Envoy().admin}
        yield from ((key, text) for key, text in theirs if text != usual[key])


def clashes(
    listeners: list[tuple[str, str]], parse: Callable[[str], address.Address] = address.parse
) -> Iterator[str]:
    """Yields a fault for each listener whose place one before it takes; the first such is named.

    parse: reads a listener's address.
    """
    taken: dict[tuple[int, object], int] = {}  # by port, and host or family: the first listener
    for position, (key, text) in enumerate(listeners):
        try:
            place = address.same_place(parse(text))
        except ValueError:  # reported as a fault of the address
            continue
        if not place.port:
            continue
        version = ipaddress.ip_address(place.host).version if place.is_ip else None
        wildcard = _WILDCARDS.get(version or 0)
        # a wildcard is in the way of all addresses of its family, and each of them in its way
        others: list[object] = [place.host, *([wildcard] if wildcard else [])]
        if place.host == wildcard:
            others.append(version)
        before = min(
            (taken[at] for one in others if (at := (place.port, one)) in taken), default=-1
        )
        if before >= 0:
            yield f"{key}: {text} is taken: {listeners[before][0]} is {listeners[before][1]}"
        taken.setdefault((place.port, place.host), position)
        if version:
            taken.setdefault((place.port, version), position)


def _listens_on_loopback(text: str) -> bool:
    try:
        return address.is_loopback(address.same_place(address.parse(text)).host)
    except ValueError:
        return False


def _rendezvous(config: Config) -> Iterator[str]:
    """Yields the fault of the place where routers meet."""
    if config.sharing is None:
        return
    try:
        rendezvous = address.parse_rendezvous(config.sharing.url)
    except ValueError as error:
        yield f"sharing.url: {error}"
        return
    path, room = rendezvous.socket, address.MAX_PATH_BYTES
    if rendezvous.directory:
        path, room = rendezvous.directory, address.MAX_PATH_BYTES - _SOCKET_NAME_BYTES
    size = len(path.encode())
    if size > room:
        yield f"sharing.url: the path has {size} bytes; the limit is {room}"


def _server_of_rendezvous(config: Config) -> Iterator[str]:
    """Yields the settings that do not fit the place where routers meet."""
    sharing = config.sharing
    if sharing is None:
        return
    try:
        rendezvous = address.parse_rendezvous(sharing.url)
    except ValueError:  # reported as a fault of the url
        return
    if sharing.ca is not None and not rendezvous.is_tls:
        yield "sharing.ca: needs a url of valkeys:// or rediss://"
    if rendezvous.directory and (sharing.username or sharing.password_file):
        yield "sharing: username and password_file are for a server, not for a directory"


def _name_of_router(config: Config) -> Iterator[str]:
    """Yields the fault of the router's name, to which each of several processes adds its number."""
    name = config.sharing.name if config.sharing else None
    processes = config.extproc.processes
    most = _NAME_CHARACTERS - (len(f"-{processes - 1}") if processes > 1 else 0)
    if name is not None and not (_ROUTER_NAME.fullmatch(name) and len(name) <= most):
        yield f"sharing.name: must be 1 to {most} printable ASCII characters without spaces"


def _user(config: Config) -> Iterator[str]:
    sharing = config.sharing
    if sharing is not None and sharing.username is not None and sharing.password_file is None:
        yield "sharing.username: needs password_file"


# The rules besides those about listeners and workers.
_RULES: tuple[Callable[[Config], Iterator[str]], ...] = (
    _deadline,
    _body_limit,
    _warm_models,
    _time_of_warm_models,
    _shedding,
    _path_prefixes,
    _header_names,
    _session_header,
    _policy_headers,
    _rank_header,
    _steered,
    _tenant_header,
    _shared_models,
    _salted_bodies,
    _recording,
    _stores,
    _several_stores,
    _mounts,
    _class_header,
    _class_names,
    _class_default,
    _held_classes,
    _counted_tokens,
    _priced_pulls,
    _told_misses,
    _pulls,
    _mirror,
    _models,
    _template_arguments,
    _rendezvous,
    _server_of_rendezvous,
    _name_of_router,
    _user,
)


def doubts(config: Config, is_there: Callable[[str], bool]) -> list[str]:
    """Returns likely mistakes, each as "key: what".

    is_there: returns whether a file or directory of this name exists.
    """
    return [
        *_unserved(config),
        *_adapters(config),
        *_open_to_others(config),
        *_closed_to_envoy(config),
        *_missing(config, is_there),
        *_roles(config),
        *_open_fleet(config.sharing),
        *feature_doubts(config),
    ]


def _open_to_others(config: Config) -> Iterator[str]:
    """Yields a note for each of the operator's servers that other hosts can reach."""
    for key, text, power in (
        ("admin.listen", config.admin.listen, "drain workers and turn their events off"),
        ("envoy.admin", config.envoy.admin, "stop Envoy and read its configuration"),
    ):
        host = address.parse(text).host
        if not address.is_loopback(host):
            yield f"{key}: anyone who reaches {text} can {power} without a password: use 127.0.0.1"
    probe = config.probe
    if probe is not None and not address.is_loopback(address.parse(probe.listen).host):
        yield (
            f"probe.listen: prompts and the token come to {probe.listen} in plain text: keep that"
            " network private, or put a proxy with TLS before it"
        )


def omissions(config: Config) -> list[str]:
    """Returns what was left out and may be missed, each as "key: what"."""
    return [*_unkeyed(config), *_open_router(config)]


def _unkeyed(config: Config) -> Iterator[str]:
    """Yields a note for each model whose prompts cannot be tokenized."""
    for position, model in enumerate(config.models):
        if model.tokenizer is None:
            yield (
                f"models[{position}].tokenizer: none: the tokens of {model.name}'s prompts are not"
                " known, so texts are compared instead of caches"
            )


def unseen_causes(config: Config) -> Iterator[str]:
    """Yields a note if nobody sees whether predictions by events are right."""
    may_publish = is_discovered(config) or any(one.events for one in config.workers)
    if config.accounting.responses != USAGE and may_publish:
        yield (
            f"accounting.responses: without {USAGE}, the router does not see whether its"
            " predictions are right, such as those by a feed that is another worker's"
        )


def _open_router(config: Config) -> Iterator[str]:
    """Yields a note if other hosts can reach the router, and prompts come to it in plain text."""
    listen = config.extproc.listen
    if config.extproc.tls or listen.startswith(address.UNIX_PREFIX):
        return
    if not address.is_loopback(address.parse(listen).host):
        yield (
            f"extproc.listen: {listen} is open without TLS: anyone in between reads prompts, and"
            " anyone who reaches it can send false requests; set extproc.tls, or keep it private"
        )


def _open_fleet(sharing: SharingSettings | None) -> Iterator[str]:
    """Yields a note if anyone who can connect to the server can forge messages."""
    if sharing is None or sharing.secret_file is not None or sharing.password_file is not None:
        return
    if not sharing.url.startswith(address.DIRECTORY_PREFIX):
        yield (
            "sharing.secret_file: without it or a password_file, anyone who reaches sharing.url can"
            " send the routers false messages"
        )


def _closed_to_envoy(config: Config) -> Iterator[str]:
    """Yields a note if Envoy calls from another host, but the router listens only on loopback."""
    listen = config.extproc.listen
    asked = [text for _, text in _routers(config) if not text.startswith(address.UNIX_PREFIX)]
    elsewhere = [text for text in asked if not _listens_on_loopback(text)]
    if _listens_on_loopback(listen) and elsewhere:
        yield (
            f"extproc.listen: {listen} can be reached only from this host or container, and Envoy"
            f" asks the router at {elsewhere[0]}: listen on 0.0.0.0, or on an address Envoy reaches"
        )


def _missing(config: Config, is_there: Callable[[str], bool]) -> Iterator[str]:
    """Yields a note for each file or directory that does not exist yet."""
    recording = config.recorder.file
    if recording is not None and not is_there(posixpath.dirname(recording) or "."):
        yield f"recorder.file: the folder of {recording} is missing: nothing is recorded"
    report = config.report.file
    if report is not None and not is_there(posixpath.dirname(report) or "."):
        yield f"report.file: the folder of {report} is missing: the report is not kept"
    state = config.state.file
    if state is not None and not is_there(posixpath.dirname(state) or "."):
        yield f"state.file: the folder of {state} is missing: nothing is known after a restart"
    file, directory = config.discovery.file, config.envoy.eds_directory
    if file is not None and not is_there(file):
        yield f"discovery.file: {file} does not exist: it adds no workers until it does"
    if directory is not None and not is_there(directory):
        yield (
            f"envoy.eds_directory: {directory} does not exist: until then, the router cannot write"
            " the workers' addresses there, and Envoy does not start without them"
        )


def _unserved(config: Config) -> Iterator[str]:
    """Yields a note for each model without a worker, if all workers are listed with models."""
    found = config.discovery
    if found.file or found.dns or found.kubernetes or len(config.models) == 1:
        return
    if all(worker.model for worker in config.workers):
        served = {worker.model for worker in config.workers}
        for position, model in enumerate(config.models):
            if model.name not in served:
                yield f"models[{position}]: no worker serves {model.name!r}"


def _roles(config: Config) -> Iterator[str]:
    """Yields notes on missing roles: for whole requests, or for one part of a split request."""
    found, mode = config.discovery, config.disaggregation.mode
    roles = {worker.role for _, worker in _workers(config)}
    if PREFILL in roles and mode is None:
        yield "disaggregation.mode: missing: until it is set, prefill workers get no requests"
    if found.file or found.dns or found.kubernetes:
        return
    if mode is not None:
        for role in (PREFILL, DECODE):
            if role not in roles:
                yield f"disaggregation.mode: no worker has the role {role}, so no request is split"
    can_answer = {BOTH} if config.disaggregation.connector == SGLANG else {BOTH, DECODE}
    if roles and roles.isdisjoint(can_answer):
        yield (
            "workers: none takes whole requests: nothing answers while the router is down or no"
            " prefill worker is up"
        )


def _adapters(config: Config) -> Iterator[str]:
    """Yields a note for each adapter of a worker that no request can name."""
    known = {name for model in config.models for name in model.lora}
    for key, worker in _workers(config):
        unknown = [name for name in worker.lora or () if name not in known]
        yield from (f"{key}.lora: {name!r} is not in any model's lora" for name in unknown)


def _workers(config: Config) -> Iterator[tuple[str, WorkerSettings | FoundWorker]]:
    for position, worker in enumerate(config.workers):
        yield f"workers[{position}]", worker
    for position, name in enumerate(config.discovery.dns):
        yield f"discovery.dns[{position}].worker", name.worker
    if config.discovery.kubernetes is not None:
        yield "discovery.kubernetes.worker", config.discovery.kubernetes.worker
