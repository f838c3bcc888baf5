"""Judges by what a running router has seen whether optional features do anything.

Tenants, classes, pulls and stores depend on headers, transfers and events of others. If these never
come, requests are answered as if the feature were off, or refused.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from extproc.config.schema import Config
from kvstate.undecodable import UNDECODABLE
from kvtools.doctor.findings import Finding, Subject

TENANTS, CLASSES, PULLS, STORES = "isolation", "classes", "pulls", "stores"

# Of fewer requests, all may be alike by chance.
LEAST_REQUESTS = 20

# So many times the least that is pulled at once; of fewer pulls, none may have met an idle worker.
LEAST_PULLS = 50

# So many tokens that a store had for a worker; of fewer, its engine may have loaded none by chance.
LEAST_OFFERED = 100_000

_ISOLATED = "kvsteer_isolated_requests_total"
_OF_CLASS = "kvsteer_class_requests_total"
_BLOCKS = "kvsteer_store_blocks"
_FAMILIES = "|".join((_ISOLATED, _OF_CLASS, _BLOCKS))

# A sample of Prometheus' text format 0.0.4, by its first label.
_NUMBER = r"\d+(?:\.\d+)?(?:e\+\d+)?"
_SAMPLE = re.compile(
    rf'^({_FAMILIES})\{{\w+="([^"\n]*)"[^\n}}]*\}} ({_NUMBER})$'.encode(), re.MULTILINE
)


class SeenShare(msgspec.Struct):
    """What a worker loaded of what its store had for it, in tokens."""

    offered_tokens: float = 0.0
    loaded_tokens: float = 0.0


class SeenTransfers(msgspec.Struct):
    """What others were to pull from a worker, in tokens, and how many arrivals were measured."""

    measured: int = 0
    sent_tokens: float = 0.0


class SeenFeed(msgspec.Struct):
    """How many blocks a rank is known to hold."""

    blocks: int = 0


class SeenWorker(msgspec.Struct):
    """A worker, as GET /workers tells of it. store: the one that it mounts."""

    name: str
    store: str | None = None
    store_share: SeenShare | None = None
    transfers: SeenTransfers | None = None
    feeds: list[SeenFeed] = []

    @property
    def blocks(self) -> int:
        """How many blocks all its ranks hold."""
        return sum([one.blocks for one in self.feeds])


class RouterFigures(NamedTuple):
    """What a router has seen. counts: of its metrics, by family and the first label's value."""

    workers: Sequence[SeenWorker]
    counts: Mapping[str, Mapping[str, float]]


_workers = msgspec.json.Decoder(list[SeenWorker])


def figures_in(workers: bytes, metrics: bytes) -> RouterFigures:
    """Returns what a router answered to GET /workers and /metrics; empty where it is unreadable."""
    counts: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for family, label, number in _SAMPLE.findall(metrics):
        counts[family.decode()][label.decode(errors="replace")] += float(number)
    try:
        seen = _workers.decode(workers)
    except UNDECODABLE:
        seen = []
    return RouterFigures(seen, counts)


def judge_figures(config: Config, figures: RouterFigures) -> Iterator[Finding]:
    """Yields what a router's news say of the features that are configured."""
    about = Subject("router")
    yield from _tenants(config, figures, about)
    yield from _classes(config, figures, about)
    yield from _pulls(config, figures, about)
    for store in config.stores:
        yield from _store(store.name, figures, about)


def _tenants(config: Config, figures: RouterFigures, about: Subject) -> Iterator[Finding]:
    rules, counts = config.isolation, figures.counts.get(_ISOLATED, {})
    if rules is None:
        return
    unnamed = counts.get("no_tenant", 0.0) + counts.get("common", 0.0)
    named, twice = counts.get("salted", 0.0), counts.get("several_tenants", 0.0)
    if unnamed >= LEAST_REQUESTS and not named:
        says = f"none of {unnamed:.0f} requests named its tenant in {rules.header}"
        yield about.wrong("isolation-header", says)
    elif named:
        says = f"{named:.0f} requests named their tenant, {unnamed:.0f} did not"
        yield about.right(TENANTS, says)
    if twice:
        says = f"{twice:.0f} requests named two tenants: the filter that sets {rules.header} must"
        yield about.note(TENANTS, f"{says} remove a client's own")


def _classes(config: Config, figures: RouterFigures, about: Subject) -> Iterator[Finding]:
    rules, counts = config.policy.classes, figures.counts.get(_OF_CLASS, {})
    total = sum(counts.values())
    if rules is None or total < LEAST_REQUESTS:
        return
    if counts.get(rules.default, 0.0) == total:
        says = f"all {total:.0f} requests were of {rules.default}, which is the default: if others"
        yield about.note(CLASSES, f"{says} were sent, {rules.header} does not reach the router")
    else:
        yield about.right(CLASSES, f"requests of {len(counts)} classes came")


def _pulls(config: Config, figures: RouterFigures, about: Subject) -> Iterator[Finding]:
    rules = config.disaggregation
    if rules.min_pulled_tokens is None or not rules.price_pulls:
        return
    each = [one.transfers for one in figures.workers if one.transfers is not None]
    tokens = sum([one.sent_tokens for one in each])
    measured = sum([one.measured for one in each])
    if measured:
        yield about.right(PULLS, f"{measured} transfers were measured")
    elif tokens >= LEAST_PULLS * rules.min_pulled_tokens:
        says = f"workers were to pull {tokens:.0f} tokens, and no arrival was seen"
        yield about.wrong("pull-unseen", says)


def _store(name: str, figures: RouterFigures, about: Subject) -> Iterator[Finding]:
    mounting = [one for one in figures.workers if one.store == name]
    blocks = figures.counts.get(_BLOCKS, {}).get(name)
    if blocks:
        yield about.right(STORES, f"{name} is known to have {blocks:.0f} blocks")
    elif blocks is not None and any(one.blocks for one in figures.workers):
        many = f"though its workers hold {sum(one.blocks for one in mounting)}"
        said = many if mounting else "and no worker is known to mount it"
        yield about.wrong("store-silent", f"no block of {name} is known, {said}")
    for one in mounting:
        share = one.store_share
        if share is None or share.offered_tokens < LEAST_OFFERED:
            continue
        says = f"{one.name} loaded {share.loaded_tokens:.0f} of the {share.offered_tokens:.0f}"
        says += f" tokens that {name} had for it"
        if share.loaded_tokens:
            yield about.right(STORES, says)
        else:
            yield about.wrong("store-unread", says)
