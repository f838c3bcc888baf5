"""What may be meant, and more often is a slip; a configuration with it is taken all the same."""

from collections.abc import Iterator

from extproc.config.discovery import FoundWorker
from extproc.config.whole import Config
from extproc.config.workers import Worker


def doubts(config: Config) -> list[str]:
    """What to look at twice, "key: what" each."""
    return [*_unserved(config), *_adapters(config)]


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
