"""Notes about optional features that, as they are configured, do nothing or less than it seems.

Tenants apart, classes, siblings, holds, handed tokens, misses, pulls, stores and deletion costs are
off by default; none of them says so at run time if something that it needs is missing.
"""

from collections.abc import Iterator

from extproc.base import address
from extproc.config.feed_kinds import kind_in
from extproc.config.schema import USAGE, Config, WorkerEvents, WorkerSettings
from extproc.config.sections import ANY, StoreSettings

COST = "cost"
_SIBLINGS = "policy.cost.siblings_percent"
_PRICED = "disaggregation.price_pulls"


def feature_doubts(config: Config) -> Iterator[str]:
    """Yields likely mistakes, each as "key: what"."""
    yield from _isolation(config)
    yield from _classes(config)
    yield from _siblings(config)
    yield from _hold(config)
    yield from _handed_tokens(config)
    yield from _misses(config)
    yield from _pulls(config)
    for number, store in enumerate(config.stores):
        yield from _store(f"stores[{number}]", store, config)
    yield from _deletion_cost(config)
    apart = routers_apart(config)
    if apart:
        yield f"envoy.routers: {apart}: configure sharing, or choice: standby"


def routers_apart(config: Config) -> str:
    """Returns a sentence if Envoy uses several routers in turn that share nothing, else ""."""
    several = config.envoy.routers
    if several is None or several.choice != ANY or config.sharing is not None:
        return ""
    count = len(several.addresses)
    says = f"Envoy asks {count} routers in turn, which share nothing: none knows what the others"
    return f"{says} have in flight" if count > 1 else ""


def is_discovered(config: Config) -> bool:
    """Returns whether there may be workers that the configuration does not list."""
    found = config.discovery
    return bool(found.file or found.dns or found.kubernetes)


def _isolation(config: Config) -> Iterator[str]:
    rules = config.isolation
    if rules is not None and {model.name for model in config.models} <= set(rules.share):
        yield "isolation.share: names every model, so all tenants share all caches"


def _classes(config: Config) -> Iterator[str]:
    rules = config.policy.classes
    if rules is None:
        return
    priorities = {one.priority for one in rules.of}
    if len(priorities) == 1:
        (number,) = priorities
        yield f"policy.classes.of: all have the priority {number}, so no class goes before another"


def _siblings(config: Config) -> Iterator[str]:
    """Yields why siblings would not stay together, although they should."""
    if not config.policy.cost.siblings_percent:
        return
    yield from _without_cost(_SIBLINGS, config)
    if not _has_feeds(config):
        yield f"{_SIBLINGS}: changes nothing for workers without events"
    scattered = f"{_SIBLINGS}: siblings that reach several"
    if config.extproc.processes > 1:
        yield f"{scattered} extproc.processes within moments may scatter"
    several = config.envoy.routers
    if several is not None and len(several.addresses) > 1 and several.choice == ANY:
        yield f"{scattered} envoy.routers within moments may scatter; choice standby takes one"


def _hold(config: Config) -> Iterator[str]:
    """Yields why no request would wait, although some should."""
    key = "policy.hold.enabled"
    if not config.policy.hold.enabled:
        return
    yield from _without_cost(key, config)
    if not _has_feeds(config):
        yield f"{key}: nobody waits: without events nobody knows what workers hold"


def _handed_tokens(config: Config) -> Iterator[str]:
    """Yields why no engine would get token ids, although some should."""
    if not config.policy.hand_tokens.enabled:
        return
    key = "policy.hand_tokens.enabled"
    if not _has_feeds(config):
        yield f"{key}: nothing is handed over: without events nobody sees an engine start anew"
    for model in config.models:
        if model.tokenizer is None:
            yield f"{key}: changes nothing for model {model.name}, which has no tokenizer"


def _misses(config: Config) -> Iterator[str]:
    """Yields why less would be known of what is computed again than it seems."""
    if not config.misses.enabled:
        return
    key = "misses.enabled"
    if not _has_feeds(config):
        yield f"{key}: without events it is not known what workers evict"
    if config.accounting.responses != USAGE:
        yield f"{key}: what engines report does not count without accounting.responses: {USAGE}"
    for model in config.models:
        if model.tokenizer is None:
            yield f"{key}: changes nothing for model {model.name}, which has no tokenizer"
    if config.misses.response_headers and config.isolation and config.isolation.share:
        shared = ", ".join(config.isolation.share)
        yield f"misses.response_headers: may tell a tenant of others' prompts of {shared} (share)"


def _without_cost(key: str, config: Config) -> Iterator[str]:
    """Yields a note if no model, or not every model, is served by the policy that reads a key."""
    name = config.policy.name
    others = [one for one in config.models if (one.policy or name) != COST]
    if name != COST and len(others) == len(config.models):
        yield f"{key}: changes nothing with policy.name {name}"
        return
    for one in others:
        yield f"{key}: changes nothing for model {one.name}, whose policy is {one.policy or name}"


def _has_feeds(config: Config) -> bool:
    listed = [worker.events is not None for worker in config.workers]
    return config.events.enabled and (any(listed) or is_discovered(config))


def _pulls(config: Config) -> Iterator[str]:
    rules, key = config.disaggregation, "disaggregation.min_pulled_tokens"
    if rules.min_pulled_tokens is None:
        return
    able = [worker for worker in config.workers if worker.transfer_port is not None]
    if len(able) < 2 and not is_discovered(config):
        count = f"{len(able)} of {len(config.workers)} workers"
        yield f"{key}: nothing is pulled: {count} have a transfer_port, and two are needed"
    yield from _shared_transfer_ports(config)
    if not _has_feeds(config):
        yield f"{key}: nothing is pulled: without events nobody knows what workers hold"
    if rules.price_pulls:
        yield from _without_cost(_PRICED, config)


def _shared_transfer_ports(config: Config) -> Iterator[str]:
    """Yields a note for each worker whose blocks would be pulled from another one."""
    owners: dict[address.Address, int] = {}
    for position, worker in enumerate(config.workers):
        if worker.transfer_port is None:
            continue
        host = address.parse(worker.endpoint).host
        place = address.same_place(address.Address(host, worker.transfer_port))
        owner = owners.setdefault(place, position)
        if owner != position:
            yield f"workers[{position}].transfer_port: {place} is that of workers[{owner}] too"


def _store(key: str, store: StoreSettings, config: Config) -> Iterator[str]:
    known = {worker.endpoint: worker for worker in config.workers}
    missing = [name for name in store.workers or () if name not in known]
    if missing and not is_discovered(config):
        yield f"{key}.workers: {missing[0]!r} is the endpoint of no worker"
    if not config.events.enabled:
        yield f"{key}: nothing is known of it while events.enabled is false"
    elif store.zmq is None:
        for name in store.workers or ():
            yield from _publisher(key, store, known.get(name))
    yield from _without_cost(key, config)
    if config.accounting.responses != USAGE:
        yield (
            f"{key}: without accounting.responses: {USAGE}, workers are believed to load all that"
            " it has"
        )


def _publisher(key: str, store: StoreSettings, worker: WorkerSettings | None) -> Iterator[str]:
    """Yields why a listed worker does not tell what it puts into a store."""
    if worker is None:
        return
    if worker.events is None:
        yield f"{key}.workers: {worker.endpoint} has no events, so nothing tells what it stores"
    elif isinstance(worker.events, WorkerEvents) and not store.media:
        kind = kind_in(worker.events)
        if not kind.names_stored:
            says = f"events of {worker.endpoint} over {kind.key} do not name a store's blocks"
            yield f"{key}.workers: {says}"


def _deletion_cost(config: Config) -> Iterator[str]:
    found, key = config.discovery.kubernetes, "discovery.kubernetes.deletion_cost"
    if found is None or not found.deletion_cost:
        return
    if not config.events.enabled:
        yield f"{key}: without events no cache is known to save tokens, so all pods cost the same"
    if config.sharing is not None:
        yield f"{key}: set it in one router only: each writes what its own requests saved"
