"""From pods to workers.

What a pod's annotations say (kvsteer.io/...) comes before AIBrix's labels (model.aibrix.ai/...),
and those before the configuration. What cannot be read is noted and left out; the pod stays.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, TypeVar

from extproc import address
from extproc.address import MAX_PORT, Address
from extproc.config import AUTO, SERVICES, EventPorts, FoundWorker, Model
from extproc.config.fleet_rules import event_ports_faults
from extproc.discovery.kubernetes_wire import Pod
from extproc.discovery.view import Found
from extproc.discovery.worker_at import worker_at

T = TypeVar("T")

OURS = "kvsteer.io/"
AIBRIX = "model.aibrix.ai/"

# AIBrix subscribes to these ports of every pod that it is told to.
AIBRIX_EVENTS = EventPorts(zmq_port=5557, replay_port=5558)

# An InferencePool has so many target ports at the most (its schema).
MAX_PORTS = 8
MAX_RANKS = 1_024

_OVER = ("Succeeded", "Failed")


class Asked(NamedTuple):
    """What is asked of all pods.

    of_all: what the configuration says of them. ports: the pool's; empty for the configuration's.
    """

    of_all: FoundWorker
    models: Sequence[Model]
    ports: tuple[int, ...] = ()


def workers_in(pods: Iterable[Pod], asked: Asked) -> tuple[tuple[Found, ...], list[str]]:
    """The workers of some pods by endpoint, and notes of what is wrong with the pods.

    Of two pods with one address the better one counts: not going away, ready, the younger.
    """
    notes: list[str] = []
    found: dict[str, tuple[Pod, Found]] = {}
    for pod in sorted(pods, key=_worth, reverse=True):
        for one in _engines(pod, asked, notes):
            endpoint = one.worker.endpoint
            if endpoint in found:
                other = found[endpoint][0].metadata.name
                notes.append(f"pods {other} and {pod.metadata.name} both have {endpoint}")
            else:
                found[endpoint] = (pod, one)
    return tuple(found[endpoint][1] for endpoint in sorted(found)), sorted(notes)


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


def _engines(pod: Pod, asked: Asked, notes: list[str]) -> Iterable[Found]:
    """The engines of one pod, one a port."""
    if not pod.status.pod_ip or pod.status.phase in _OVER:
        return
    try:
        host = address.parse(str(Address(pod.status.pod_ip, 0)))
    except ValueError:
        host = Address("", 0)
    if not host.is_ip:
        notes.append(f"pod {pod.metadata.name}: its address is none")
        return
    said = _Said(pod, notes)
    of_all = _described(said, asked)
    given = said.annotation("port", _ports) or said.label("port", _ports)
    ports = given or asked.ports or (of_all.port,)
    is_leaving = pod.metadata.deletion_timestamp is not None
    draining = is_leaving or bool(said.annotation("draining", _flag))
    for offset, port in enumerate(ports):
        if not _fits(of_all.events, offset):
            notes.append(f"pod {pod.metadata.name}: its event ports are above {MAX_PORT}")
            of_all = replace(of_all, events=None)
        yield Found(
            worker_at(host.host, port, of_all, draining=draining, offset=offset),
            excluded="" if _is_ready(pod) else "its pod is not ready",
            identity=pod.metadata.uid,
            adapters=_adapters(said, of_all, asked.models),
        )


def _described(said: "_Said", asked: Asked) -> FoundWorker:
    of_all = asked.of_all
    model = said.annotation("model", _text) or said.label("name", _text) or of_all.model
    if model is not None and model not in [one.name for one in asked.models]:
        said.note(f"its model {model!r} is not under models")
    return replace(
        of_all,
        model=model,
        block_size=said.annotation("block-size", _positive) or of_all.block_size,
        lora=said.annotation("lora", _names) or of_all.lora,
        events=_events(said, of_all),
    )


def _events(said: "_Said", of_all: FoundWorker) -> EventPorts | Literal["auto"] | None:
    events = of_all.events
    aibrix = said.label("kv-events-enabled", _flag)
    if aibrix is not None:
        events = (events or AIBRIX_EVENTS) if aibrix else None
    word = said.annotation("events", _auto_or_none)
    if word is not None:
        events = "auto" if word == AUTO else None
    zmq, grpc = said.annotation("zmq-port", _port), said.annotation("grpc-port", _port)
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
        replay_port=said.annotation("replay-port", _port) or events.replay_port,
        topic=said.annotation("topic", _text) or events.topic,
        ranks=said.annotation("ranks", _ranks) or events.ranks,
        service=said.annotation("service", _service) or events.service,
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
    said: "_Said", of_all: FoundWorker, models: Sequence[Model]
) -> tuple[tuple[int, str], ...]:
    """The number that AIBrix's label gives to the pod's adapter, if it has just one."""
    number = said.label("lora-id", _number)
    if number is None:
        return ()
    served = {one.name: one.lora for one in models}
    only = models[0].name if len(models) == 1 else ""
    names = of_all.lora or served.get(of_all.model or only, ())
    if len(names) != 1:
        said.note(f"{AIBRIX}lora-id: which adapter it numbers is not known; name it in {OURS}lora")
        return ()
    return ((number, names[0]),)


class _Said:
    """What a pod says of itself."""

    def __init__(self, pod: Pod, notes: list[str]) -> None:
        self._name = pod.metadata.name
        self._annotations = pod.metadata.annotations or {}
        self._labels = pod.metadata.labels or {}
        self._notes = notes

    def annotation(self, name: str, read: Callable[[str], T]) -> T | None:
        """One of ours."""
        return self._read(self._annotations, OURS + name, read)

    def label(self, name: str, read: Callable[[str], T]) -> T | None:
        """One of AIBrix's."""
        return self._read(self._labels, AIBRIX + name, read)

    def note(self, what: str) -> None:
        """Something is wrong with the pod; noted once."""
        text = f"pod {self._name}: {what}"
        if text not in self._notes:
            self._notes.append(text)

    def _read(self, said: Mapping[str, str], key: str, read: Callable[[str], T]) -> T | None:
        if key not in said:
            return None
        try:
            return read(said[key].strip())
        except ValueError:
            self.note(f"{key}: cannot be read: {said[key][:40]!r}")
            return None


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):  # noqa: PLR2004 - int64
        raise ValueError
    return int(text)


def _positive(text: str) -> int:
    number = _number(text)
    if not number:
        raise ValueError
    return number


def _port(text: str) -> int:
    port = _positive(text)
    if port > MAX_PORT:
        raise ValueError
    return port


def _ports(text: str) -> tuple[int, ...]:
    ports = tuple(_port(one.strip()) for one in text.split(","))
    if len(set(ports)) != len(ports) or len(ports) > MAX_PORTS:
        raise ValueError
    return ports


def _ranks(text: str) -> int:
    ranks = _positive(text)
    if ranks > MAX_RANKS:
        raise ValueError
    return ranks


def _text(text: str) -> str:
    if not text:
        raise ValueError
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(_text(one.strip()) for one in text.split(","))


def _flag(text: str) -> bool:
    return _word(text.lower(), ("false", "true")) == "true"


def _auto_or_none(text: str) -> str:
    return _word(text, (AUTO, "none"))


def _service(text: str) -> str:
    return _word(text, SERVICES)


def _word(text: str, words: Sequence[str]) -> str:
    if text not in words:
        raise ValueError
    return text
