"""Messages as a publisher sends them, and waiting for their effects."""

from typing import Any

import msgspec

from kvstate.overlap import Prompt, Tokens

PATIENCE_SECONDS = 60.0


def payload(number: int, *events: Any, life: int = 0) -> bytes:
    """Batch `number` of a publisher's life-th incarnation."""
    return msgspec.msgpack.encode([1000.0 * life + number, list(events), 0])


def frames(number: int, *events: Any, life: int = 0, topic: bytes = b"kv") -> list[bytes]:
    """The message of that batch."""
    return [topic, number.to_bytes(8, "big"), payload(number, *events, life=life)]


def block(number: int, parent: int | None = None) -> list[Any]:
    """The event that stores block `number`, of one token that is its number."""
    return ["BlockStored", [number], parent, [number], 1]


def chain(length: int) -> Prompt:
    """A prompt whose blocks are 1, 2, ... `length`."""
    return Prompt("m", Tokens("I", range(1, length + 2)))
