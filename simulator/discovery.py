"""Where a worker's events are, as each engine tells it over HTTP."""

from typing import Any

from simulator.publisher import HIGH_WATER_MARK_BATCHES, Publisher
from simulator.settings import Settings
from simulator.worker import Worker

Body = dict[str, Any]


def kv_event_sources(worker: Worker) -> Body:
    """GET /kv_event_sources of vLLM 0.30 and later: by data-parallel rank."""
    return {
        str(rank.number): _source(rank.publisher, worker.settings)
        for rank in worker.ranks
        if rank.publisher
    }


def server_info(worker: Worker) -> Body:
    """GET /server_info of SGLang, as far as it tells of events: rank r is on both ports + r."""
    settings = worker.settings
    return {
        "version": settings.speaks.version,
        "model_path": str(settings.model_dir),
        "served_model_name": settings.model,
        "page_size": settings.block_size_tokens,
        "dp_size": settings.ranks,
        "disable_radix_cache": not settings.prefix_caching,
        "kv_events": _kv_events(worker),
    }


def _source(publisher: Publisher, settings: Settings) -> Body:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": publisher.endpoint,
        "replay_endpoint": publisher.replay_endpoint,
        "buffer_steps": settings.buffer_batches,
        "hwm": HIGH_WATER_MARK_BATCHES,
        "max_queue_size": HIGH_WATER_MARK_BATCHES,
        "topic": settings.topic,
    }


def _kv_events(worker: Worker) -> Body | None:
    if worker.events_endpoint is None:
        return None
    host, port = _host_and_port(worker.events_endpoint)
    body = {
        "publisher": "zmq",
        "endpoint_host": host,
        "endpoint_port_base": port,
        "topic": worker.settings.topic,
        "block_size": worker.settings.block_size_tokens,
        "dp_size": worker.settings.ranks,
    }
    if worker.replay_endpoint is not None:
        body["replay_endpoint_port_base"] = _host_and_port(worker.replay_endpoint)[1]
    return body


def _host_and_port(endpoint: str) -> tuple[str, int]:
    """SGLang calls every address of the host "*"."""
    host, _, port = endpoint.partition("://")[2].rpartition(":")
    return "*" if host in {"0.0.0.0", "[::]"} else host, int(port)  # noqa: S104 - read, not bound
