"""What workers tell over HTTP, held against the configuration."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from extproc.config import Config, Model, Worker
from extproc.doctor.findings import About, Finding, shown
from extproc.workers.feed_sources import discovered
from kvstate.feeds.feed_sources import ZmqSource

# A difference of clocks that cannot be the way of a message, nor the seconds of a Date header.
MAX_SKEW_SECONDS = 5.0


class Served(NamedTuple):
    """What GET /v1/models lists: models, and the adapters that name one as their parent."""

    models: tuple[str, ...]
    adapters: frozenset[str]


class _Card(msgspec.Struct):
    id: str
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


def served(answer: bytes) -> Served | None:
    """What an answer of /v1/models lists; None if it is none."""
    try:
        cards = msgspec.json.decode(answer, type=_Cards).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    models = tuple(card.id for card in cards if not card.parent)
    return Served(models, frozenset(card.id for card in cards if card.parent))


def model_served(config: Config, worker: Worker, told: Served) -> Model | None:
    """The configured model that a worker serves, as far as that can be told."""
    listed = [one for one in config.models if not {one.name, *one.aliases}.isdisjoint(told.models)]
    if worker.model is not None or len(config.models) == 1:
        name = config.model_of(worker)
        return next(one for one in config.models if one.name == name)
    return listed[0] if listed else None


def judge_models(about: About, config: Config, worker: Worker, told: Served) -> Iterator[Finding]:
    """Whether a worker serves the model that requests for it name, and the adapters."""
    model = model_served(config, worker, told)
    names = shown(told.models)
    if model is None or {model.name, *model.aliases}.isdisjoint(told.models):
        wanted = " or ".join(one.name for one in ((model,) if model else config.models))
        says = f"it serves {names}; requests routed to it name {wanted}, which it answers with 404"
        yield about.wrong("model-not-served", says)
        return
    yield about.right("models", f"it serves {names}")
    unlisted = [name for name in (model.name, *model.aliases) if name not in told.models]
    if unlisted:
        says = f"it does not list {shown(unlisted)}: requests by such a name may get 404"
        yield about.note("models", says)
    yield from _adapters(about, worker, model, told.adapters)


def _adapters(
    about: About, worker: Worker, model: Model, listed: frozenset[str]
) -> Iterator[Finding]:
    wanted = model.lora if worker.lora is None else worker.lora
    strangers = sorted(listed - {*model.lora, *wanted})
    if strangers:
        says = f"it serves {shown(strangers)}, which `lora` does not name: requests for such an"
        yield about.wrong("adapter-not-configured", f"{says} adapter are routed by load alone")
    missing = sorted(set(wanted) - listed)
    if not missing:
        return
    if worker.lora or (listed and not worker.learn):
        says = f"it does not list the adapters {shown(missing)}"
        yield about.wrong("adapter-not-served", says)
    elif not listed:
        yield about.note("models", "it lists no adapters; whether it serves them is not known")


def judge_clock(about: About, ahead_seconds: float, witness: str) -> Finding:
    """Whether a clock agrees with ours.

    witness: what told the time.
    """
    if abs(ahead_seconds) <= MAX_SKEW_SECONDS:
        return about.right("clock", f"agrees with ours, by {witness}")
    where = "ahead of" if ahead_seconds > 0 else "behind"
    says = f"it is {abs(ahead_seconds):.0f} s {where} ours, by {witness}"
    return about.wrong("clock-skew", says)


def judge_block_size(
    about: About, config: Config, worker: Worker, size: int, witness: str
) -> Finding:
    """Whether the engine's block size is the configured one.

    witness: what told it.
    """
    if worker.block_size not in (None, size):
        says = f"{size} tokens by {witness}, {worker.block_size} in the configuration"
        return about.wrong("block-size", says)
    if size == 1:
        says = "1 token: every token is a block, and the index sixteen times as large as with 16"
        return about.note("block size", says)
    if worker.block_size is None and size != config.policy.block_size:
        says = f"{size} tokens by {witness}; {config.policy.block_size} are assumed until an event"
        return about.note("block size", says)
    return about.right("block size", f"{size} tokens by {witness}")


# vLLM's /metrics: its configuration is the labels of a gauge.
_PREFIX_CACHING = re.compile(
    rb'^vllm:cache_config_info\{[^}\n]*enable_prefix_caching="(\w+)"', re.MULTILINE
)


class _ServerInfo(msgspec.Struct):
    disable_radix_cache: bool = False


def judge_prefix_caching(about: About, metrics: bytes, info: bytes) -> Iterator[Finding]:
    """Whether an engine says that it keeps no prefixes.

    metrics: vLLM's answer to /metrics. info: SGLang's to /server_info; both empty where not told.
    """
    found = _PREFIX_CACHING.search(metrics)
    if found and found[1] == b"False":
        says = "the engine's prefix cache is off (/metrics): it reuses nothing"
        yield about.wrong("prefix-caching-off", says)
    try:
        is_off = msgspec.json.decode(info, type=_ServerInfo).disable_radix_cache
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        is_off = False
    if is_off:
        says = "the engine's prefix cache is off (/server_info): it reuses nothing"
        yield about.wrong("prefix-caching-off", says)


class Told(NamedTuple):
    """Where a worker says that it publishes; sources: empty where it publishes nothing."""

    sources: tuple[ZmqSource, ...]
    path: str


def told_sources(path: str, answer: bytes, host: str) -> Told | None:
    """What an answer to one of `extproc.workers.feed_sources.PATHS` tells; None if it does not."""
    sources = discovered(path, answer, host)
    if sources:
        return Told(sources, path)
    try:
        raw = msgspec.json.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(raw, Mapping):
        return None
    is_off = not raw or ("kv_events" in raw and not raw["kv_events"])
    return Told((), path) if is_off else None
