"""Rules between the keys of a configuration, and of addresses and files that they name."""

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from extproc import address, headers
from extproc.config import Config, Model
from extproc.config.fleet_rules import address_fault, fleet_faults
from extproc.tokenizing.tokenizer_files import TokenizerFiles

# A field name that a proxy may be asked to set (RFC 9110, section 5.1; no pseudo-header).
_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

_MODE = re.compile("0?[0-7]{3}")

# What requests cannot do without, or is ours.
_TAKEN = frozenset({
    "host", "content-length", "content-type", "transfer-encoding", "connection", "authorization",
    headers.DESTINATION, headers.MODEL,
})  # fmt: skip


def broken_rules(config: Config) -> list[str]:
    """What is wrong, one line each: "key: what"."""
    return [
        *_listeners(config),
        *_limits(config),
        *_headers(config),
        *_models(config),
        *fleet_faults(config),
    ]


def _socket_or_address(key: str, text: str) -> Iterator[str]:
    if not text.startswith(address.UNIX_PREFIX):
        yield from address_fault(key, text, address.parse)
    elif text == address.UNIX_PREFIX:
        yield f"{key}: unix: needs a path"


def _listeners(config: Config) -> Iterator[str]:
    yield from _socket_or_address("extproc.listen", config.extproc.listen)
    yield from address_fault("admin.listen", config.admin.listen, address.parse)
    yield from address_fault("metrics.listen", config.metrics.listen, address.parse)
    yield from address_fault("envoy.listen", config.envoy.listen, _parse_ip)
    yield from address_fault("envoy.admin", config.envoy.admin, _parse_ip)
    if config.envoy.router is not None:
        yield from _socket_or_address("envoy.router", config.envoy.router)
    if config.extproc.tls is not None and config.extproc.listen.startswith(address.UNIX_PREFIX):
        yield "extproc.tls: is for host:port; extproc.socket_mode says who may use a Unix socket"
    if not _MODE.fullmatch(config.extproc.socket_mode):
        yield f'extproc.socket_mode: must be as "0660", is {config.extproc.socket_mode!r}'
    router_tls = config.envoy.router_tls
    if router_tls is not None and (router_tls.certificate is None) != (router_tls.key is None):
        yield "envoy.router_tls: certificate and key belong together"
    own = Counter((config.extproc.listen, config.admin.listen, config.metrics.listen))
    yield from (
        f"{text}: is given to two listeners"
        for text, uses in own.items()
        if uses > 1 and not text.endswith(":0")
    )


def _parse_ip(text: str) -> None:
    place = address.parse(text)
    if not place.is_ip and place.host != "localhost":
        raise ValueError(f"must be an IP address and a port: Envoy listens on no name: {text!r}")


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
        yield "models: at least one is needed"
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
