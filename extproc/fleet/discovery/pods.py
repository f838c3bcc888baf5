"""Turns pods into workers: parses the objects of a Kubernetes API server.

A pod's annotations (kvsteer.io/...) take precedence over AIBrix's labels (model.aibrix.ai/...),
which take precedence over the configuration. llm-d's annotation of active ports counts if neither
names a port. An unreadable value is noted and ignored; the pod stays.

Sources: the API conventions (resourceVersion, continue, 410 Gone, watch events and bookmarks),
core/v1 Pod, and InferencePool of inference.networking.k8s.io/v1. Objects come as raw JSON and each
is decoded alone, so that a bad one does not affect the others.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal, NamedTuple, TypeGuard, TypeVar

import msgspec

from extproc.base import address
from extproc.base.address import MAX_PORT, Address
from extproc.base.engine import ANNOTATED, CONFIGURED, ENGINES, FRONT_ENDS
from extproc.config.feed_kinds import FOUND_ADDRESSES, KINDS, with_port
from extproc.config.fleet_rules import event_ports_faults
from extproc.config.schema import (
    AUTO,
    MAX_NAMED_RANKS,
    SERVICES,
    EventPorts,
    FoundWorker,
    Model,
    WorkerEngine,
)
from extproc.config.sections import BOTH, DECODE, PREFILL, ROLES
from extproc.fleet.discovery.view import Sighting, worker_at
from kvstate.undecodable import UNDECODABLE

Part = TypeVar("Part", bound="Thing")


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """The metadata of any object."""

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class Thing(msgspec.Struct, frozen=True):
    """Any object of the API."""

    metadata: Metadata


class Condition(msgspec.Struct, frozen=True):
    """One condition of a pod; status is True, False or Unknown."""

    type: str
    status: str


class PodStatus(msgspec.Struct, frozen=True):
    """The status of a pod."""

    phase: str = ""
    conditions: list[Condition] | None = None
    pod_ip: str = msgspec.field(default="", name="podIP")


class Pod(Thing, frozen=True):
    """A pod."""

    status: PodStatus = PodStatus()


class TargetPort(msgspec.Struct, frozen=True):
    """One port of a pool: each of its pods runs an engine there."""

    number: int


class Selector(msgspec.Struct, frozen=True, rename="camel"):
    """The labels of the pods that a pool selects."""

    match_labels: dict[str, str] = {}


class PoolSpec(msgspec.Struct, frozen=True, rename="camel"):
    """The specification of a pool."""

    selector: Selector
    target_ports: list[TargetPort] = []


class Pool(Thing, frozen=True):
    """An InferencePool."""

    spec: PoolSpec


class _ListMetadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continues: str = msgspec.field(default="", name="continue")


# Most objects of one page of a list, which is also what is asked for; and most commas of a page,
# since the decoder blocks every thread: 2,000 for each object.
PAGE = 500
MAX_PAGE_COMMAS = 2_000 * PAGE


class Listing(msgspec.Struct, frozen=True):
    """One page of a list."""

    metadata: _ListMetadata
    items: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=PAGE)] | None = None


class WatchEvent(msgspec.Struct, frozen=True):
    """One line of a watch: ADDED, MODIFIED, DELETED, BOOKMARK or ERROR."""

    type: str
    object: msgspec.Raw


class RefusalStatus(msgspec.Struct, frozen=True):
    """A `Status` object."""

    code: int = 0
    reason: str = ""
    message: str = ""


def read_listing(body: bytes) -> Listing | None:
    """Returns a page of a list; None if the body is not one, or has too many parts."""
    if body.count(b",") > MAX_PAGE_COMMAS:
        return None
    try:
        return msgspec.json.decode(body, type=Listing)
    except UNDECODABLE:
        return None


def read_event(line: bytes) -> WatchEvent | None:
    """Returns a watch event; None if the line is not one."""
    try:
        return msgspec.json.decode(line, type=WatchEvent)
    except UNDECODABLE:
        return None


def read_thing(raw: msgspec.Raw, kind: type[Part]) -> Part | None:
    """Returns an object of a kind; None if it cannot be read, or has no uid."""
    try:
        thing = msgspec.json.decode(raw, type=kind)
    except UNDECODABLE:
        return None
    return thing if thing.metadata.uid else None


def read_refusal(body: bytes | msgspec.Raw) -> RefusalStatus:
    """Returns why the server refuses; an empty `Refusal` if it does not say."""
    try:
        return msgspec.json.decode(body, type=RefusalStatus)
    except UNDECODABLE:
        return RefusalStatus()


def read_version(raw: msgspec.Raw) -> str:
    """Returns the resourceVersion of any object, also of a bookmark; "" if it has none."""
    try:
        return msgspec.json.decode(raw, type=Thing).metadata.resource_version
    except UNDECODABLE:
        return ""


Word = TypeVar("Word")

OURS = "kvsteer.io/"
AIBRIX = "model.aibrix.ai/"

# The annotation with the pool's ports that the pod serves; the second name is llm-d's former one.
ACTIVE_PORTS = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")

# The values of llm-d's role label and the roles that they mean; AIBrix's label has fewer values.
LLMD_ROLE, AIBRIX_ROLE = "llm-d.ai/role", "role-name"
LLMD_ROLES = {
    "prefill": PREFILL,
    "encode-prefill": PREFILL,
    "decode": DECODE,
    "prefill-decode": BOTH,
    "encode-prefill-decode": BOTH,
    "both": BOTH,
}
# A pod with this role encodes images for others, and answers no requests.
ENCODE = "encode"

# An InferencePool has at most this many target ports (its schema).
MAX_PORTS = 8

# Most characters of an annotation in a note: an annotation may have 256 KiB.
MAX_SHOWN = 40


class PodWords:
    """What a pod's annotations and labels say."""

    def __init__(self, pod: Pod) -> None:
        self._name = pod.metadata.name
        self._annotations = pod.metadata.annotations or {}
        self._labels = pod.metadata.labels or {}
        self._notes: list[str] = []

    def annotation(self, name: str, read: Callable[[str], Word]) -> Word | None:
        """Returns the value of one of our annotations, None if it is absent or unreadable.

        name: without the prefix. read: turns the text into the value; raises ValueError if it
        cannot.
        """
        return self._read(self._annotations, OURS + name, read)

    def label(self, name: str, read: Callable[[str], Word]) -> Word | None:
        """Returns the value of one of AIBrix's labels, as `annotation` does."""
        return self._read(self._labels, AIBRIX + name, read)

    def active_ports(self) -> frozenset[int] | None:
        """Returns the ports of llm-d's annotation, None if it is absent; notes invalid ports."""
        key = next((key for key in ACTIVE_PORTS if key in self._annotations), None)
        if key is None:
            return None
        said = (one.strip() for one in self._annotations[key].split(","))
        ports = (self._read({key: one}, key, port_in) for one in said if one)
        return frozenset(port for port in ports if port is not None)

    def role(self) -> str | None:
        """Returns the role by our annotation, else llm-d's label, else AIBrix's; None if none."""
        return (
            self.annotation("role", role_in)
            or self._read(self._labels, LLMD_ROLE, llmd_role_in)
            or self._read(self._labels, AIBRIX_ROLE, role_in)
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """The faults of the pod, one text each."""
        return tuple(self._notes)

    def note(self, what: str) -> None:
        """Notes that something is wrong with the pod, once."""
        text = f"pod {self._name}: {what}"
        if text not in self._notes:
            self._notes.append(text)

    def _read(self, said: Mapping[str, str], key: str, read: Callable[[str], Word]) -> Word | None:
        if key not in said:
            return None
        try:
            return read(said[key].strip())
        except ValueError:
            self.note(f"{key}: cannot be read: {said[key][:MAX_SHOWN]!r}")
            return None


# Each of these functions raises ValueError if the text is not of its kind.


def number_in(text: str) -> int:
    """Reads a number of at most 18 digits, so that it fits 64 bits."""
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise ValueError
    return int(text)


def positive_in(text: str) -> int:
    """Reads a number above 0."""
    number = number_in(text)
    if not number:
        raise ValueError
    return number


def port_in(text: str) -> int:
    """Reads a port."""
    port = positive_in(text)
    if port > MAX_PORT:
        raise ValueError
    return port


def ports_in(text: str) -> tuple[int, ...]:
    """Reads up to `MAX_PORTS` different ports, separated by commas."""
    ports = tuple(port_in(one.strip()) for one in text.split(","))
    if len(set(ports)) != len(ports) or len(ports) > MAX_PORTS:
        raise ValueError
    return ports


def ranks_in(text: str) -> int:
    """Reads a number of ranks, which a pod may set only up to `MAX_NAMED_RANKS`."""
    ranks = positive_in(text)
    if ranks > MAX_NAMED_RANKS:
        raise ValueError
    return ranks


def text_in(text: str) -> str:
    """Reads any non-empty string."""
    if not text:
        raise ValueError
    return text


def names_in(text: str) -> tuple[str, ...]:
    """Reads non-empty strings, separated by commas."""
    return tuple(text_in(one.strip()) for one in text.split(","))


def flag_in(text: str) -> bool:
    """Reads `true` or `false`, in any case."""
    return _word(text.lower(), ("false", "true")) == "true"


def auto_or_none_in(text: str) -> str:
    """Reads `auto` or `none`."""
    return _word(text, (AUTO, "none"))


def service_in(text: str) -> str:
    """Reads the name of a gRPC service of events."""
    return _word(text, SERVICES)


def engine_in(text: str) -> WorkerEngine:
    """Reads an engine and its release, as in vllm/0.32.0, or vllm/0.33.0/rust."""
    name, _, rest = text.partition("/")
    version, _, front_end = rest.partition("/")
    given = _word(front_end, FRONT_ENDS) if front_end else None
    engine = WorkerEngine(_word(name, ENGINES), version, given)
    if engine.engine is None:
        raise ValueError
    return engine


def role_in(text: str) -> str:
    """Reads which part of a request a worker takes."""
    return _word(text, ROLES)


def llmd_role_in(text: str) -> str:
    """Reads the same in llm-d's words; returns `ENCODE` as it is, since no role here matches it."""
    return LLMD_ROLES.get(text) or _word(text, (ENCODE,))


def _word(text: str, words: Sequence[str]) -> str:
    if text not in words:
        raise ValueError
    return text


# AIBrix subscribes to these ports of every pod whose label enables KV events.
AIBRIX_EVENTS = EventPorts(zmq_port=5557, replay_port=5558)

_OVER = ("Succeeded", "Failed")


class PodSettings(NamedTuple):
    """Settings of all pods.

    of_all: the configured ones. models: the configured models. ports: the pool's; () for the
    configured port.
    """

    of_all: FoundWorker
    models: Sequence[Model]
    ports: tuple[int, ...] = ()


class _PodReading(NamedTuple):
    """What was read from one pod; of pods with one address, the one of greatest worth counts."""

    pod: Pod
    worth: tuple[bool, bool, str, str]
    engines: tuple[Sighting, ...]
    notes: tuple[str, ...]


class Engines:
    """Turns pods into workers; a pod that has not changed is not read again."""

    def __init__(self, asked: PodSettings) -> None:
        self._settings = asked
        self._readings: dict[str, _PodReading] = {}  # by uid

    def read_all(self, pods: Iterable[Pod]) -> tuple[tuple[Sighting, ...], list[str]]:
        """Returns the workers of these pods, sorted by endpoint, and notes on faults of the pods.

        Of two pods with one address, the one that is not terminating counts, else the ready one,
        else the younger one.
        """
        self._readings = {pod.metadata.uid: self._read_pod(pod) for pod in pods}
        notes: list[str] = []
        found: dict[str, tuple[Pod, Sighting]] = {}
        for one in sorted(self._readings.values(), key=lambda read: read.worth, reverse=True):
            notes += one.notes
            name = one.pod.metadata.name
            for engine in one.engines:
                endpoint = engine.worker.endpoint
                other = found.setdefault(endpoint, (one.pod, engine))[0].metadata
                if other.uid != one.pod.metadata.uid:
                    notes.append(f"pods {other.name} and {name} both have {endpoint}")
        return tuple(found[endpoint][1] for endpoint in sorted(found)), sorted(notes)

    def _read_pod(self, pod: Pod) -> _PodReading:
        known = self._readings.get(pod.metadata.uid)
        return known if known is not None and known.pod is pod else _read(pod, self._settings)


def _read(pod: Pod, asked: PodSettings) -> _PodReading:
    said = PodWords(pod)
    engines = tuple(_engines(pod, said, asked))
    return _PodReading(pod, _worth(pod), engines, said.notes)


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


def _engines(pod: Pod, said: PodWords, asked: PodSettings) -> Iterator[Sighting]:
    """Yields the engines of one pod, one for each port."""
    if not pod.status.pod_ip or pod.status.phase in _OVER:
        return
    try:
        host = address.parse(str(Address(pod.status.pod_ip, 0)))
    except ValueError:
        host = Address("", 0)
    if not host.is_ip:
        said.note("its podIP is no IP address")
        return
    of_all = _described(said, asked)
    engine = said.annotation("engine", engine_in)
    of_all = replace(of_all, engine=engine or of_all.engine)
    ports = _ports(said, asked.ports or (of_all.port,))
    role = said.role()
    encodes = role == ENCODE
    transfer_port = said.annotation("transfer-port", port_in)
    of_all = replace(of_all, role=BOTH if encodes else role or of_all.role)
    is_leaving = pod.metadata.deletion_timestamp is not None
    draining = is_leaving or bool(said.annotation("draining", flag_in))
    for offset, port in ports:
        if not _fits(of_all.events, offset):
            said.note(f"its event ports are above {MAX_PORT}")
            of_all = replace(of_all, events=None)
        handover = transfer_port and transfer_port + offset
        if handover and handover > MAX_PORT:
            said.note(f"its transfer port is above {MAX_PORT}")
            handover = None
        worker = worker_at(host.host, port, of_all, draining=draining, offset=offset)
        yield Sighting(
            replace(worker, transfer_port=handover),
            excluded=_excluded(pod, encodes=encodes),
            identity=pod.metadata.uid,
            pod=pod.metadata.name,
            adapters=_adapters(said, of_all, asked.models),
            engine_source=CONFIGURED if engine is None else ANNOTATED,
        )


def _excluded(pod: Pod, *, encodes: bool) -> str:
    if encodes:
        return "it encodes media for others"
    return "" if _is_ready(pod) else "its pod is not ready"


def _ports(said: PodWords, of_pool: tuple[int, ...]) -> list[tuple[int, int]]:
    """Returns the position and the port of each engine; its event ports follow from the position.

    An inactive port keeps its position, so that the others' event ports do not move.
    """
    given = said.annotation("port", ports_in) or said.label("port", ports_in)
    if given:
        return list(enumerate(given))
    active = said.active_ports()
    if active is None:
        return list(enumerate(of_pool))
    if active and active.isdisjoint(of_pool):
        said.note("none of its active ports is one of the pool's")
    return [(place, port) for place, port in enumerate(of_pool) if port in active]


def _described(said: PodWords, asked: PodSettings) -> FoundWorker:
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


# The kinds of feeds for which a pod's annotation names a port.
_WITH_PORTS = [kind for kind in KINDS if kind.found_key == f"{kind.key}_port"]

# Where a worker publishes its events, None for nowhere.
Events = EventPorts | Literal["auto"] | None


def _events(said: PodWords, of_all: FoundWorker) -> Events:
    """Returns where a pod's worker publishes: as all do, unless the pod says otherwise.

    Its ports count more than its word on events, and that more than AIBrix's label.
    """
    events = _with_ports(said, _with_word(said, _with_label(said, of_all.events)))
    return _checked(said, _with_details(said, events)) if _has_ports(events) else events


def _has_ports(events: Events) -> TypeGuard[EventPorts]:
    return isinstance(events, EventPorts)


def _with_label(said: PodWords, events: Events) -> Events:
    """Returns the events as AIBrix's label switches them."""
    is_on = said.label("kv-events-enabled", flag_in)
    if is_on is None:
        return events
    return (events or AIBRIX_EVENTS) if is_on else None


def _with_word(said: PodWords, events: Events) -> Events:
    """Returns the events as the pod's annotation `events` says."""
    word = said.annotation("events", auto_or_none_in)
    if word is None:
        return events
    return "auto" if word == AUTO else None


def _with_ports(said: PodWords, events: Events) -> Events:
    """Returns the events at the port that the pod names; a ZMQ port counts more than one of gRPC.

    The other ports of all workers are for ZMQ, so they do not go with a port of gRPC.
    """
    base = events if _has_ports(events) else EventPorts()
    named = [(kind, said.annotation(f"{kind.key}-port", port_in)) for kind in _WITH_PORTS]
    found = (with_port(base, kind, port) for kind, port in named if port is not None)
    return next(found, events)


def _with_details(said: PodWords, events: EventPorts) -> EventPorts:
    """Returns the events with what else the pod's annotations say about them."""
    return replace(
        events,
        replay_port=said.annotation("replay-port", port_in) or events.replay_port,
        load_port=said.annotation("load-port", port_in) or events.load_port,
        topic=said.annotation("topic", text_in) or events.topic,
        ranks=said.annotation("ranks", ranks_in) or events.ranks,
        service=said.annotation("service", service_in) or events.service,
    )


def _checked(said: PodWords, events: EventPorts) -> EventPorts | None:
    """Returns the events, or None with a note of the first fault if they contradict each other."""
    for fault in event_ports_faults("its events", events):
        said.note(fault)
        return None
    return events


def _fits(events: EventPorts | str | None, offset: int) -> bool:
    if not isinstance(events, EventPorts):
        return True
    return max(one.last_port(events, offset) for one in FOUND_ADDRESSES) <= MAX_PORT


def _adapters(
    said: PodWords, of_all: FoundWorker, models: Sequence[Model]
) -> tuple[tuple[int, str], ...]:
    """Returns AIBrix's number for the pod's adapter, with its name; () unless both are known."""
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
