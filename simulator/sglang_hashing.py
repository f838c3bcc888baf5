"""SGLang's page hashes, as its radix cache chains and publishes them (0.5.23, default format).

A page's digest is SHA-256 over the digest before it and the token ids as 4 little-endian bytes
each. A cache salt is the digest before the first page; a LoRA adapter is not part of it, so an
adapter's pages have the same hashes as the base model's and are other pages all the same.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

from simulator.hashing import Namespace, ShownToken

_SALT_PREFIX = b"sglang-cache-salt-v1\0"
_DIGEST_BYTES = 32
_WIRE_BYTES = 8


@dataclass(frozen=True, slots=True)
class SglangHashing:
    """On the wire, the first 8 bytes as a signed big-endian number.

    With `bigrams` (EAGLE) a page is of pairs of consecutive tokens, N tokens giving N - 1 pairs,
    and both words of each pair are hashed.
    """

    bigrams: bool = False

    @property
    def lookahead(self) -> int:
        """1 with bigrams: the second word of a page's last pair."""
        return int(self.bigrams)

    def block_digest(
        self, parent: bytes | None, tokens: Sequence[int], namespace: Namespace
    ) -> bytes:
        """The 32-byte digest of one full page, and the adapter's name behind it."""
        before = _seed(namespace.salt) if parent is None else parent[:_DIGEST_BYTES]
        words = list(chain.from_iterable(pairwise(tokens))) if self.bigrams else tokens
        digest = hashlib.sha256(before + struct.pack(f"<{len(words)}I", *words)).digest()
        return digest + (namespace.adapter.name.encode() if namespace.adapter else b"")

    def wire(self, digest: bytes) -> int:
        """Signed, 64 bits."""
        return int.from_bytes(digest[:_WIRE_BYTES], "big", signed=True)

    def shown(self, tokens: Sequence[int]) -> tuple[ShownToken, ...]:
        """One after the other, or pair after pair."""
        return tuple(pairwise(tokens)) if self.bigrams else tuple(tokens)


def _seed(salt: str | None) -> bytes:
    return b"" if salt is None else hashlib.sha256(_SALT_PREFIX + salt.encode()).digest()
