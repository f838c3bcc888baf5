"""What the Kubernetes API server answers to list and watch, as far as discovery reads it.

Sources: the API conventions (resourceVersion, continue, 410 Gone, watch events and bookmarks),
core/v1 Pod, and InferencePool of inference.networking.k8s.io/v1. Objects come as raw JSON and each
is decoded alone, so that a bad one spoils no other.
"""

from typing import TypeVar

import msgspec

T = TypeVar("T", bound="Thing")


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """Of any object."""

    name: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class Thing(msgspec.Struct, frozen=True):
    """Any object."""

    metadata: Metadata


class Condition(msgspec.Struct, frozen=True):
    """One condition of a pod; status is True, False or Unknown."""

    type: str
    status: str


class PodStatus(msgspec.Struct, frozen=True):
    """How a pod is."""

    phase: str = ""
    conditions: list[Condition] | None = None
    pod_ip: str = msgspec.field(default="", name="podIP")


class Pod(Thing, frozen=True):
    """A pod."""

    status: PodStatus = PodStatus()


class TargetPort(msgspec.Struct, frozen=True):
    """One port of a pool: an engine of each of its pods."""

    number: int


class Selector(msgspec.Struct, frozen=True, rename="camel"):
    """Which pods."""

    match_labels: dict[str, str] = {}


class PoolSpec(msgspec.Struct, frozen=True, rename="camel"):
    """What a pool is."""

    selector: Selector
    target_ports: list[TargetPort] = []


class Pool(Thing, frozen=True):
    """An InferencePool."""

    spec: PoolSpec


class _ListMetadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continues: str = msgspec.field(default="", name="continue")


class Listing(msgspec.Struct, frozen=True):
    """One page of a list."""

    metadata: _ListMetadata
    items: list[msgspec.Raw] | None = None


class WatchEvent(msgspec.Struct, frozen=True):
    """One line of a watch: ADDED, MODIFIED, DELETED, BOOKMARK or ERROR."""

    type: str
    object: msgspec.Raw


class Refusal(msgspec.Struct, frozen=True):
    """A `Status` object."""

    code: int = 0
    reason: str = ""
    message: str = ""


def read_listing(body: bytes) -> Listing | None:
    """A page of a list; None if it is none."""
    try:
        return msgspec.json.decode(body, type=Listing)
    except (msgspec.DecodeError, RecursionError):
        return None


def read_event(line: bytes) -> WatchEvent | None:
    """An event; None if it is none."""
    try:
        return msgspec.json.decode(line, type=WatchEvent)
    except (msgspec.DecodeError, RecursionError):
        return None


def read_thing(raw: msgspec.Raw, kind: type[T]) -> T | None:
    """An object of a kind; None if it is none that could be told from others."""
    try:
        thing = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError):
        return None
    return thing if thing.metadata.uid else None


def read_refusal(body: bytes | msgspec.Raw) -> Refusal:
    """Why the server refuses; empty if it does not say."""
    try:
        return msgspec.json.decode(body, type=Refusal)
    except (msgspec.DecodeError, RecursionError):
        return Refusal()


def read_version(raw: msgspec.Raw) -> str:
    """The resourceVersion of any object, a bookmark's too; "" if it has none."""
    try:
        return msgspec.json.decode(raw, type=Thing).metadata.resource_version
    except (msgspec.DecodeError, RecursionError):
        return ""
