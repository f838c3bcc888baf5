"""vLLM 0.32's block hashes (algorithm `sha256`, its default).

A block's digest is SHA-256 over the protocol-5 pickle of (parent digest, token ids, extra keys),
so two blocks with equal digests hold the same tokens after the same history in the same namespace.
"""

import hashlib
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_PICKLE_PROTOCOL = 5
_WIRE_BYTES = 8


def _digest(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=_PICKLE_PROTOCOL)).digest()


ROOT: bytes = _digest("vllm-none-hash")
"""The parent of a prompt's first block: a constant since vLLM 0.30, random a process before."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter; `number` counts from 1 and travels as the deprecated `lora_id`."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class Namespace:
    """What besides tokens separates cached blocks: the adapter they were computed with, a salt."""

    adapter: Adapter | None = None
    salt: str | None = None

    def hashed_keys(self, *, first: bool) -> tuple[tuple[str, ...], ...] | None:
        """The tagged keys inside the digest; the salt is part of the `first` block only.

        vLLM puts an adapter's path beside its name; a simulated one has none and repeats the name.
        """
        keys: list[tuple[str, ...]] = []
        if self.adapter is not None:
            keys.append(("lora", self.adapter.name, self.adapter.name))
        if first and self.salt is not None:
            keys.append(("cache_salt", self.salt))
        return tuple(keys) or None

    def published_keys(self, *, first: bool) -> tuple[str, ...] | None:
        """The same keys as events show them: untagged, an adapter by its name alone."""
        keys = self.hashed_keys(first=first)
        return None if keys is None else tuple(key[1] for key in keys)


NO_NAMESPACE = Namespace()
"""What most requests share."""


def block_digest(parent: bytes | None, tokens: Sequence[int], namespace: Namespace) -> bytes:
    """The 32-byte digest of one full block after `parent`, or of a first block if that is None."""
    keys = namespace.hashed_keys(first=parent is None)
    return _digest((ROOT if parent is None else parent, tuple(tokens), keys))


def chain(tokens: Sequence[int], block_size: int, namespace: Namespace) -> Iterator[bytes]:
    """The digests of all full blocks of `tokens`, first to last."""
    parent = None
    for end in range(block_size, len(tokens) + 1, block_size):
        parent = block_digest(parent, tokens[end - block_size : end], namespace)
        yield parent


def wire_hash(digest: bytes) -> int:
    """A digest as events carry it: its low 8 bytes as an unsigned big-endian number."""
    return int.from_bytes(digest[-_WIRE_BYTES:], "big")
