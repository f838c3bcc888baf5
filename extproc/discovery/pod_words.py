"""What a pod says of itself in annotations (kvsteer.io/... and llm-d's) and AIBrix's labels.

What cannot be read is noted and taken for not said.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from extproc.address import MAX_PORT
from extproc.config import AUTO, SERVICES
from extproc.config.workers import MAX_NAMED_RANKS
from extproc.discovery.kubernetes_wire import Pod

T = TypeVar("T")

OURS = "kvsteer.io/"
AIBRIX = "model.aibrix.ai/"

# Which of a pool's ports the pod serves; the second is what llm-d called it before.
ACTIVE_PORTS = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")

# An InferencePool has so many target ports at the most (its schema).
MAX_PORTS = 8

# More of what a pod says is not repeated: an annotation may have 256 KiB.
MAX_SHOWN = 40


class PodWords:
    """What a pod says of itself."""

    def __init__(self, pod: Pod) -> None:
        self._name = pod.metadata.name
        self._annotations = pod.metadata.annotations or {}
        self._labels = pod.metadata.labels or {}
        self._notes: list[str] = []

    def annotation(self, name: str, read: Callable[[str], T]) -> T | None:
        """One of ours."""
        return self._read(self._annotations, OURS + name, read)

    def label(self, name: str, read: Callable[[str], T]) -> T | None:
        """One of AIBrix's."""
        return self._read(self._labels, AIBRIX + name, read)

    def active_ports(self) -> frozenset[int] | None:
        """The ports of llm-d's annotation, None where there is none; what is no port is noted."""
        key = next((key for key in ACTIVE_PORTS if key in self._annotations), None)
        if key is None:
            return None
        said = (one.strip() for one in self._annotations[key].split(","))
        ports = (self._read({key: one}, key, port_in) for one in said if one)
        return frozenset(port for port in ports if port is not None)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is wrong with it."""
        return tuple(self._notes)

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
            self.note(f"{key}: cannot be read: {said[key][:MAX_SHOWN]!r}")
            return None


# Each of these raises ValueError where a text is none of its kind.


def number_in(text: str) -> int:
    """A number of at most 18 digits, so that it fits 64 bits."""
    if not (text.isascii() and text.isdigit() and len(text) <= 18):  # noqa: PLR2004 - int64
        raise ValueError
    return int(text)


def positive_in(text: str) -> int:
    """A number above 0."""
    number = number_in(text)
    if not number:
        raise ValueError
    return number


def port_in(text: str) -> int:
    """A port."""
    port = positive_in(text)
    if port > MAX_PORT:
        raise ValueError
    return port


def ports_in(text: str) -> tuple[int, ...]:
    """Ports with commas between them, each once."""
    ports = tuple(port_in(one.strip()) for one in text.split(","))
    if len(set(ports)) != len(ports) or len(ports) > MAX_PORTS:
        raise ValueError
    return ports


def ranks_in(text: str) -> int:
    """A number of ranks, of which no pod may name as many as the configuration."""
    ranks = positive_in(text)
    if ranks > MAX_NAMED_RANKS:
        raise ValueError
    return ranks


def text_in(text: str) -> str:
    """Any text but none."""
    if not text:
        raise ValueError
    return text


def names_in(text: str) -> tuple[str, ...]:
    """Texts with commas between them."""
    return tuple(text_in(one.strip()) for one in text.split(","))


def flag_in(text: str) -> bool:
    """`true` or `false`, in any case."""
    return _word(text.lower(), ("false", "true")) == "true"


def auto_or_none_in(text: str) -> str:
    """`auto` or `none`."""
    return _word(text, (AUTO, "none"))


def service_in(text: str) -> str:
    """The name of a gRPC service of events."""
    return _word(text, SERVICES)


def _word(text: str, words: Sequence[str]) -> str:
    if text not in words:
        raise ValueError
    return text
