"""Block hashes: of the tokens, the blocks before them, and the namespace.

Every engine chains digests over these in its own way; a `Hashing` is one engine's way.

vLLM (algorithm `sha256`, its default): SHA-256 over the protocol-5 pickle of (parent digest, token
ids, extra keys).

SGLang (0.5.23, default format), as its radix cache chains and publishes pages: SHA-256 over the
digest before and the token ids as 4 little-endian bytes each. A hash of the cache salt is the
digest before the first page; a LoRA adapter is not part of it, so an adapter's pages have the same
hashes as the base model's, although they are different pages.
"""

import hashlib
import pickle
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Protocol

# A token, or with bigrams a token and the one after it.
ShownToken = int | tuple[int, int]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter; `number` counts from 1 and travels as the deprecated `lora_id`."""

    name: str
    number: int


@dataclass(frozen=True, slots=True)
class PlacedItem:
    """An image in a prompt: its hash, and the first of its tokens and how many it has."""

    identifier: str
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class CacheNamespace:
    """The namespace of cached blocks: the adapter that computed them, a salt, and the images."""

    adapter: Adapter | None = None
    salt: str | None = None
    items: tuple[PlacedItem, ...] = ()

    def item_keys(self, start: int, end: int) -> list[tuple[str, int]]:
        """Returns the images in the tokens of a block, and where each begins relative to it."""
        return [
            (one.identifier, one.start - start)
            for one in self.items
            if one.start < end and one.start + one.count > start
        ]

    def hashed_keys(self, *, first: bool) -> tuple[tuple[str, ...], ...] | None:
        """Returns the tagged keys inside vLLM's digest; only the `first` block has the salt.

        vLLM puts an adapter's path beside its name; a simulated one has none and repeats the name.
        """
        keys: list[tuple[str, ...]] = []
        if self.adapter is not None:
            keys.append(("lora", self.adapter.name, self.adapter.name))
        if first and self.salt is not None:
            keys.append(("cache_salt", self.salt))
        return tuple(keys) or None

    def published_keys(self, *, first: bool) -> tuple[str, ...] | None:
        """Returns these keys in the form of events: untagged, an adapter by its name alone."""
        keys = self.hashed_keys(first=first)
        return None if keys is None else tuple(key[1] for key in keys)


NO_NAMESPACE = CacheNamespace()
"""The namespace of most requests."""


class Hashing(Protocol):
    """One engine's way to hash blocks."""

    @property
    def lookahead(self) -> int:
        """Tokens after a block that its digest contains too: 1 with bigrams, else 0."""

    def block_digest(
        self, parent: bytes | None, tokens: Sequence[int], namespace: CacheNamespace, start: int
    ) -> bytes:
        """Returns the digest of one full block after `parent`, or of a first block if that is None.

        start: the place of its first token in the prompt.

        `tokens` are the block's and then `lookahead` more. Equal digests mean equal blocks.
        """

    def wire(self, digest: bytes) -> int:
        """Returns a digest in the form of events."""

    def event_tokens(self, tokens: Sequence[int]) -> tuple[ShownToken, ...]:
        """Returns the tokens of some blocks, and `lookahead` more, in the form of events."""


def chain_of(
    tokens: Sequence[int], block_size: int, namespace: CacheNamespace, hashing: Hashing
) -> Iterator[bytes]:
    """Yields the digests of all full blocks of `tokens`, first to last."""
    parent = None
    for end in range(block_size + hashing.lookahead, len(tokens) + 1, block_size):
        start = end - block_size - hashing.lookahead
        parent = hashing.block_digest(parent, tokens[start:end], namespace, start)
        yield parent


_SALT_PREFIX = b"sglang-cache-salt-v1\0"
_DIGEST_BYTES = 32
_WIRE_BYTES = 8


@dataclass(frozen=True, slots=True)
class SglangHashing:
    """SGLang's way; on the wire, the first 8 bytes as a signed big-endian number.

    With `bigrams` (EAGLE), a page consists of pairs of consecutive tokens, N tokens giving N - 1
    pairs, and both words of each pair are hashed.
    """

    bigrams: bool = False

    @property
    def lookahead(self) -> int:
        """1 with bigrams: the second word of a page's last pair."""
        return int(self.bigrams)

    def block_digest(
        self, parent: bytes | None, tokens: Sequence[int], namespace: CacheNamespace, start: int
    ) -> bytes:
        """Returns the 32-byte digest of one full page, followed by the adapter's name."""
        del start  # images are in the ids
        before = _seed(namespace.salt) if parent is None else parent[:_DIGEST_BYTES]
        words = list(chain.from_iterable(pairwise(tokens))) if self.bigrams else tokens
        digest = hashlib.sha256(before + struct.pack(f"<{len(words)}I", *words)).digest()
        return digest + (namespace.adapter.name.encode() if namespace.adapter else b"")

    def wire(self, digest: bytes) -> int:
        """Returns a signed number of 64 bits."""
        return int.from_bytes(digest[:_WIRE_BYTES], "big", signed=True)

    def event_tokens(self, tokens: Sequence[int]) -> tuple[ShownToken, ...]:
        """Returns the tokens one after the other, or pair after pair with bigrams."""
        return tuple(pairwise(tokens)) if self.bigrams else tuple(tokens)


def _seed(salt: str | None) -> bytes:
    return b"" if salt is None else hashlib.sha256(_SALT_PREFIX + salt.encode()).digest()


_PICKLE_PROTOCOL = 5


def _digest(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=_PICKLE_PROTOCOL)).digest()


ROOT: bytes = _digest("vllm-none-hash")
"""The parent of a prompt's first block: a constant since vLLM 0.30, random a process before."""


@dataclass(frozen=True, slots=True)
class VllmHashing:
    """vLLM's way, from `root`; on the wire, the low 8 bytes as an unsigned big-endian number."""

    root: bytes = ROOT
    lookahead = 0

    def block_digest(
        self, parent: bytes | None, tokens: Sequence[int], namespace: CacheNamespace, start: int
    ) -> bytes:
        """Returns the 32-byte digest of one full block."""
        keys = namespace.hashed_keys(first=parent is None)
        items = namespace.item_keys(start, start + len(tokens))
        if items:
            keys = (*(keys or ()), *(("mm", name, str(offset)) for name, offset in items))
        return _digest((self.root if parent is None else parent, tuple(tokens), keys))

    def wire(self, digest: bytes) -> int:
        """Returns an unsigned number of 64 bits."""
        return int.from_bytes(digest[-_WIRE_BYTES:], "big")

    def event_tokens(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Returns the tokens one after the other."""
        return tuple(tokens)
