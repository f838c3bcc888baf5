"""vLLM's block hashes (algorithm `sha256`, its default).

A block's digest is SHA-256 over the protocol-5 pickle of (parent digest, token ids, extra keys).
"""

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.hashing import Namespace

_PICKLE_PROTOCOL = 5
_WIRE_BYTES = 8


def _digest(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=_PICKLE_PROTOCOL)).digest()


ROOT: bytes = _digest("vllm-none-hash")
"""The parent of a prompt's first block: a constant since vLLM 0.30, random a process before."""


@dataclass(frozen=True, slots=True)
class VllmHashing:
    """Chains from `root`; on the wire, the low 8 bytes as an unsigned big-endian number."""

    root: bytes = ROOT
    lookahead = 0

    def block_digest(
        self, parent: bytes | None, tokens: Sequence[int], namespace: Namespace
    ) -> bytes:
        """The 32-byte digest of one full block."""
        keys = namespace.hashed_keys(first=parent is None)
        return _digest((self.root if parent is None else parent, tuple(tokens), keys))

    def wire(self, digest: bytes) -> int:
        """Unsigned, 64 bits."""
        return int.from_bytes(digest[-_WIRE_BYTES:], "big")

    def shown(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """One after the other."""
        return tuple(tokens)
