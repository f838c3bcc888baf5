"""From pods to workers.

What a pod's annotations say (kvsteer.io/...) comes before AIBrix's labels (model.aibrix.ai/...),
and those before the configuration. What cannot be read is noted and left out; the pod stays.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from extproc import address
from extproc.address import MAX_PORT, Address
from extproc.config import AUTO, EventPorts, FoundWorker, Model
from extproc.config.fleet_rules import event_ports_faults
from extproc.discovery.kubernetes_wire import Pod
from extproc.discovery.pod_words import (
    AIBRIX,
    MAX_SHOWN,
    OURS,
    PodWords,
    auto_or_none_in,
    flag_in,
    names_in,
    number_in,
    port_in,
    ports_in,
    positive_in,
    ranks_in,
    service_in,
    text_in,
)
from extproc.discovery.view import Found
from extproc.discovery.worker_at import worker_at

# AIBrix subscribes to these ports of every pod that it is told to.
AIBRIX_EVENTS = EventPorts(zmq_port=5557, replay_port=5558)

_OVER = ("Succeeded", "Failed")


class Asked(NamedTuple):
    """What is asked of all pods.

    of_all: what the configuration says of them. ports: the pool's; empty for the configuration's.
    """

    of_all: FoundWorker
    models: Sequence[Model]
    ports: tuple[int, ...] = ()


class _Read(NamedTuple):
    """What a pod was read as; worth orders the pods that have an address in common."""

    pod: Pod
    worth: tuple[bool, bool, str, str]
    engines: tuple[Found, ...]
    notes: tuple[str, ...]


class Engines:
    """The engines of pods; each pod is read once as long as it stays the same."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._read: dict[str, _Read] = {}  # by uid

    def of(self, pods: Iterable[Pod]) -> tuple[tuple[Found, ...], list[str]]:
        """The workers of these pods by endpoint, and notes of what is wrong with the pods.

        Of two pods with one address the better one counts: not going away, ready, the younger.
        """
        self._read = {pod.metadata.uid: self._of(pod) for pod in pods}
        notes: list[str] = []
        found: dict[str, tuple[Pod, Found]] = {}
        for one in sorted(self._read.values(), key=lambda read: read.worth, reverse=True):
            notes += one.notes
            name = one.pod.metadata.name
            for engine in one.engines:
                endpoint = engine.worker.endpoint
                other = found.setdefault(endpoint, (one.pod, engine))[0].metadata
                if other.uid != one.pod.metadata.uid:
                    notes.append(f"pods {other.name} and {name} both have {endpoint}")
        return tuple(found[endpoint][1] for endpoint in sorted(found)), sorted(notes)

    def _of(self, pod: Pod) -> _Read:
        known = self._read.get(pod.metadata.uid)
        return known if known is not None and known.pod is pod else _read(pod, self._asked)


def _read(pod: Pod, asked: Asked) -> _Read:
    said = PodWords(pod)
    engines = tuple(_engines(pod, said, asked))
    return _Read(pod, _worth(pod), engines, said.notes)


def _worth(pod: Pod) -> tuple[bool, bool, str, str]:
    metadata = pod.metadata
    return (
        metadata.deletion_timestamp is None,
        _is_ready(pod),
        metadata.creation_timestamp or "",
        metadata.uid,
    )


def _is_ready(pod: Pod) -> bool:
    conditions = pod.status.conditions or ()
    return any(one.type == "Ready" and one.status == "True" for one in conditions)


def _engines(pod: Pod, said: PodWords, asked: Asked) -> Iterator[Found]:
    """The engines of one pod, one a port."""
    if not pod.status.pod_ip or pod.status.phase in _OVER:
        return
    try:
        host = address.parse(str(Address(pod.status.pod_ip, 0)))
    except ValueError:
        host = Address("", 0)
    if not host.is_ip:
        said.note("its address is none")
        return
    of_all = _described(said, asked)
    ports = _ports(said, asked.ports or (of_all.port,))
    is_leaving = pod.metadata.deletion_timestamp is not None
    draining = is_leaving or bool(said.annotation("draining", flag_in))
    for offset, port in ports:
        if not _fits(of_all.events, offset):
            said.note(f"its event ports are above {MAX_PORT}")
            of_all = replace(of_all, events=None)
        yield Found(
            worker_at(host.host, port, of_all, draining=draining, offset=offset),
            excluded="" if _is_ready(pod) else "its pod is not ready",
            identity=pod.metadata.uid,
            adapters=_adapters(said, of_all, asked.models),
        )


def _ports(said: PodWords, of_pool: tuple[int, ...]) -> list[tuple[int, int]]:
    """Each port with its place, which its event ports follow: an inactive one keeps its own."""
    given = said.annotation("port", ports_in) or said.label("port", ports_in)
    if given:
        return list(enumerate(given))
    active = said.active_ports()
    if active is None:
        return list(enumerate(of_pool))
    if active and active.isdisjoint(of_pool):
        said.note("none of its active ports is one of the pool's")
    return [(place, port) for place, port in enumerate(of_pool) if port in active]


def _described(said: PodWords, asked: Asked) -> FoundWorker:
    of_all = asked.of_all
    model = said.annotation("model", text_in) or said.label("name", text_in) or of_all.model
    if model is not None and model not in [one.name for one in asked.models]:
        said.note(f"its model {model[:MAX_SHOWN]!r} is not under models")
    return replace(
        of_all,
        model=model,
        block_size=said.annotation("block-size", positive_in) or of_all.block_size,
        lora=said.annotation("lora", names_in) or of_all.lora,
        events=_events(said, of_all),
    )


def _events(said: PodWords, of_all: FoundWorker) -> EventPorts | Literal["auto"] | None:
    events = of_all.events
    aibrix = said.label("kv-events-enabled", flag_in)
    if aibrix is not None:
        events = (events or AIBRIX_EVENTS) if aibrix else None
    word = said.annotation("events", auto_or_none_in)
    if word is not None:
        events = "auto" if word == AUTO else None
    zmq, grpc = said.annotation("zmq-port", port_in), said.annotation("grpc-port", port_in)
    base = events if isinstance(events, EventPorts) else EventPorts()
    if zmq is not None or grpc is not None:
        events = replace(
            base,
            zmq_port=zmq,
            grpc_port=None if zmq is not None else grpc,
            replay_port=None if zmq is None else base.replay_port,
            drain=False,
        )
    if not isinstance(events, EventPorts):
        return events
    events = replace(
        events,
        replay_port=said.annotation("replay-port", port_in) or events.replay_port,
        topic=said.annotation("topic", text_in) or events.topic,
        ranks=said.annotation("ranks", ranks_in) or events.ranks,
        service=said.annotation("service", service_in) or events.service,
    )
    for fault in event_ports_faults("its events", events):
        said.note(fault)
        return None
    return events


def _fits(events: EventPorts | str | None, offset: int) -> bool:
    if not isinstance(events, EventPorts):
        return True
    last = max(events.zmq_port or 0, events.replay_port or 0) + (offset + 1) * events.ranks - 1
    return max(last, (events.grpc_port or 0) + offset) <= MAX_PORT


def _adapters(
    said: PodWords, of_all: FoundWorker, models: Sequence[Model]
) -> tuple[tuple[int, str], ...]:
    """The number that AIBrix's label gives to the pod's adapter, if it has just one."""
    number = said.label("lora-id", number_in)
    if number is None:
        return ()
    served = {one.name: one.lora for one in models}
    only = models[0].name if len(models) == 1 else ""
    names = of_all.lora or served.get(of_all.model or only, ())
    if len(names) != 1:
        said.note(f"{AIBRIX}lora-id: which adapter it numbers is not known; name it in {OURS}lora")
        return ()
    return ((number, names[0]),)
