"""Rules between the keys of a configuration, and of addresses and files that they name."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from extproc import address
from extproc.config import Config, Model, Worker, WorkerEvents
from extproc.tokenizing.tokenizer_files import TokenizerFiles


def broken_rules(config: Config) -> list[str]:
    """What is wrong, one line each: "key: what"."""
    return [
        *_listeners(config),
        *_limits(config),
        *_models(config),
        *_workers(config),
    ]


def _address_fault(key: str, text: str, parse: Callable[[str], object]) -> Iterator[str]:
    try:
        parse(text)
    except ValueError as error:
        yield f"{key}: {error}"


def _socket_or_address(key: str, text: str) -> Iterator[str]:
    if not text.startswith(address.UNIX_PREFIX):
        yield from _address_fault(key, text, address.parse)
    elif text == address.UNIX_PREFIX:
        yield f"{key}: unix: needs a path"


def _listeners(config: Config) -> Iterator[str]:
    yield from _socket_or_address("extproc.listen", config.extproc.listen)
    yield from _address_fault("admin.listen", config.admin.listen, address.parse)
    yield from _address_fault("metrics.listen", config.metrics.listen, address.parse)
    yield from _address_fault("envoy.listen", config.envoy.listen, _parse_ip)
    yield from _address_fault("envoy.admin", config.envoy.admin, _parse_ip)
    if config.envoy.router is not None:
        yield from _socket_or_address("envoy.router", config.envoy.router)
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


def _workers(config: Config) -> Iterator[str]:
    if not config.workers:
        yield "workers: at least one is needed"
    uses = Counter(worker.endpoint for worker in config.workers)
    yield from (
        f"workers: the endpoint {endpoint} is given {count} times"
        for endpoint, count in uses.items()
        if count > 1
    )
    for position, worker in enumerate(config.workers):
        yield from _worker(f"workers[{position}]", worker, config)


def _worker(key: str, worker: Worker, config: Config) -> Iterator[str]:
    yield from _address_fault(f"{key}.endpoint", worker.endpoint, address.parse)
    names = [model.name for model in config.models]
    if worker.model is None and len(names) > 1:
        yield f"{key}.model: missing; there are {len(names)} models: {', '.join(names)}"
    if worker.model is not None and worker.model not in names:
        yield f"{key}.model: {worker.model!r} is not under models"
    if isinstance(worker.events, WorkerEvents):
        yield from _events(f"{key}.events", worker.events)


def _events(key: str, events: WorkerEvents) -> Iterator[str]:
    if [events.zmq, events.grpc, events.drain].count(None) != len(("zmq", "grpc")):
        yield f"{key}: needs one of zmq, grpc and drain"
    if events.grpc is not None:
        yield from _address_fault(f"{key}.grpc", events.grpc, address.parse)
    if events.drain is not None:
        yield from _address_fault(f"{key}.drain", events.drain, address.parse_http)
    if events.zmq is None:
        yield from (
            f"{key}.{name}: needs zmq"
            for name, value in (("replay", events.replay), ("bind", events.bind))
            if value
        )
    yield from _ports(key, events)


def _ports(key: str, events: WorkerEvents) -> Iterator[str]:
    taken: set[tuple[str, int]] = set()
    for name, text in (("zmq", events.zmq), ("replay", events.replay)):
        if text is None:
            continue
        try:
            place = address.parse_tcp(text)
        except ValueError as error:
            yield f"{key}.{name}: {error}"
            continue
        if place.port + events.ranks - 1 > address.MAX_PORT:
            yield f"{key}.{name}: port {place.port} + {events.ranks} ranks is above 65535"
        ports = {(place.host, place.port + rank) for rank in range(events.ranks)}
        if ports & taken:
            yield (
                f"{key}: with {events.ranks} ranks the ports of zmq and replay overlap"
                " (rank r uses both ports + r)"
            )
        taken |= ports
