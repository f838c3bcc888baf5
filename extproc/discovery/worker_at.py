"""From an address that was found to a worker, by what the configuration says of them all."""

from typing import Literal

from extproc.address import Address
from extproc.config import EventPorts, FoundWorker, Worker, WorkerEvents


def worker_at(
    host: str, port: int, of_all: FoundWorker, *, draining: bool = False, offset: int = 0
) -> Worker:
    """The worker at host:port.

    host: an IP address. offset: how many engines of the same host come before it, each with as many
    event ports as it has ranks.
    """
    return Worker(
        endpoint=str(Address(host, port)),
        model=of_all.model,
        block_size=of_all.block_size,
        events=_events(host, port, of_all.events, offset),
        lora=of_all.lora,
        learn=of_all.learn,
        draining=draining,
    )


def _events(
    host: str, port: int, ports: EventPorts | Literal["auto"] | None, offset: int
) -> WorkerEvents | Literal["auto"] | None:
    if not isinstance(ports, EventPorts):
        return ports

    def at(base: int | None, step: int) -> str | None:
        return None if base is None else str(Address(host, base + offset * step))

    zmq, replay = at(ports.zmq_port, ports.ranks), at(ports.replay_port, ports.ranks)
    return WorkerEvents(
        zmq=zmq and f"tcp://{zmq}",
        replay=replay and f"tcp://{replay}",
        topic=ports.topic,
        ranks=ports.ranks,
        grpc=at(ports.grpc_port, 1),
        service=ports.service,
        drain=f"http://{Address(host, port)}" if ports.drain else None,
    )
