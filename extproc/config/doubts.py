"""What may be meant, and more often is a slip; a configuration with it is taken all the same."""

import ipaddress
from collections.abc import Callable, Iterator

from extproc import address
from extproc.config.discovery import FoundWorker
from extproc.config.whole import Config
from extproc.config.workers import Worker


def doubts(config: Config, is_there: Callable[[str], bool]) -> list[str]:
    """What to look at twice, "key: what" each.

    is_there: whether there is a file or directory of this name.
    """
    return [
        *_unserved(config),
        *_adapters(config),
        *_open_to_others(config),
        *_missing(config, is_there),
    ]


def _open_to_others(config: Config) -> Iterator[str]:
    """Servers for the operator, on addresses that others can reach."""
    for key, text, power in (
        ("admin.listen", config.admin.listen, "drain workers and turn their events off"),
        ("envoy.admin", config.envoy.admin, "stop Envoy and read its configuration"),
    ):
        host = address.parse(text).host
        if host != "localhost" and not _is_loopback(host):
            yield f"{key}: whoever reaches {text} can {power}, without a password: use 127.0.0.1"


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _missing(config: Config, is_there: Callable[[str], bool]) -> Iterator[str]:
    """What may come to be while the router runs."""
    file, directory = config.discovery.file, config.envoy.eds_directory
    if file is not None and not is_there(file):
        yield f"discovery.file: there is no {file}: until there is, no worker is found in it"
    if directory is not None and not is_there(directory):
        yield (
            f"envoy.eds_directory: there is no {directory}: until there is, the router cannot write"
            " the workers' addresses there, and Envoy does not start without them"
        )


def _unserved(config: Config) -> Iterator[str]:
    """Models of which no worker is listed, where all workers are, and each names its model."""
    found = config.discovery
    if found.file or found.dns or found.kubernetes or len(config.models) == 1:
        return
    if all(worker.model for worker in config.workers):
        served = {worker.model for worker in config.workers}
        for position, model in enumerate(config.models):
            if model.name not in served:
                yield f"models[{position}]: no worker serves {model.name!r}"


def _adapters(config: Config) -> Iterator[str]:
    """Adapters of workers that no request can name."""
    known = {name for model in config.models for name in model.lora}
    for key, worker in _workers(config):
        unknown = [name for name in worker.lora or () if name not in known]
        yield from (f"{key}.lora: {name!r} is under no model's lora" for name in unknown)


def _workers(config: Config) -> Iterator[tuple[str, Worker | FoundWorker]]:
    for position, worker in enumerate(config.workers):
        yield f"workers[{position}]", worker
    for position, name in enumerate(config.discovery.dns):
        yield f"discovery.dns[{position}].worker", name.worker
    if config.discovery.kubernetes is not None:
        yield "discovery.kubernetes.worker", config.discovery.kubernetes.worker
