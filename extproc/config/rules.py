"""Rules between the keys of a configuration, and of addresses and files that they name."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from extproc import headers
from extproc.config import Config, Model
from extproc.config.fleet_rules import AT_LEAST_ONE, fleet_faults
from extproc.config.listener_rules import listener_faults
from extproc.tokenizing.tokenizer_files import TokenizerFiles

# A field name that a proxy may be asked to set (RFC 9110, section 5.1; no pseudo-header).
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

# What requests cannot do without, or is ours.
_TAKEN = frozenset({
    "host", "content-length", "content-type", "transfer-encoding", "connection", "authorization",
    headers.DESTINATION, headers.MODEL,
})  # fmt: skip


def broken_rules(config: Config) -> list[str]:
    """What is wrong, one line each: "key: what"."""
    return [
        *listener_faults(config),
        *_limits(config),
        *_headers(config),
        *_models(config),
        *fleet_faults(config),
    ]


def _limits(config: Config) -> Iterator[str]:
    timeout_ms = config.envoy.message_timeout_ms
    if config.extproc.deadline_ms >= timeout_ms:
        yield f"extproc.deadline_ms: must be below envoy.message_timeout_ms ({timeout_ms})"
    limit_bytes = config.envoy.request_body_buffer_limit_bytes
    if config.extproc.max_body_bytes > limit_bytes:
        yield (
            "extproc.max_body_bytes: must not be above"
            f" envoy.request_body_buffer_limit_bytes ({limit_bytes}): Envoy answers 413 there"
        )
    if config.policy.shed and config.policy.max_in_flight is None:
        yield "policy.max_in_flight: missing: policy.shed needs it"


def _headers(config: Config) -> Iterator[str]:
    policy = config.policy
    for key, name in (("header", policy.header), ("rank_header", policy.rank_header)):
        if name is not None and not _HEADER.fullmatch(name):
            yield f"policy.{key}: is no name of a header: {name!r}"
    name = (policy.rank_header or "").lower()
    if name and (name in _TAKEN or name == (policy.header or "").lower()):
        yield f"policy.rank_header: {policy.rank_header!r} is set or read for something else"


def _models(config: Config) -> Iterator[str]:
    if not config.models:
        yield f"models: {AT_LEAST_ONE}"
    names = [
        (f"models[{position}]", name)
        for position, model in enumerate(config.models)
        for name in (model.name, *model.aliases, *model.lora)
    ]
    uses = Counter(name for _, name in names)
    seen: set[str] = set()
    for key, name in names:
        if uses[name] > 1 and name not in seen:
            seen.add(name)
            yield f"{key}: the name {name!r} is used {uses[name]} times"
    for position, model in enumerate(config.models):
        yield from _files(f"models[{position}]", model)


def _files(key: str, model: Model) -> Iterator[str]:
    if isinstance(model.tokenizer, str):
        try:
            TokenizerFiles.find(model.tokenizer)
        except FileNotFoundError as error:
            yield f"{key}.tokenizer: {error}"
    if model.chat_template is not None and not Path(model.chat_template).is_file():
        yield f"{key}.chat_template: no such file: {model.chat_template}"
