"""What tells cached blocks apart: their tokens, what came before them, and their namespace.

Every engine chains digests over that, each in its own way; a `Hashing` is one of these ways.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

# A token, or with bigrams a token and the one after it.
ShownToken = int | tuple[int, int]


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
        """The tagged keys inside vLLM's digest; the salt is part of the `first` block only.

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


class Hashing(Protocol):
    """One engine's way to name blocks."""

    @property
    def lookahead(self) -> int:
        """Tokens after a block that its digest contains too: 1 with bigrams, else 0."""

    def block_digest(
        self, parent: bytes | None, tokens: Sequence[int], namespace: Namespace
    ) -> bytes:
        """The digest of one full block after `parent`, or of a first block if that is None.

        `tokens` are the block's and then `lookahead` more. Equal digests are equal blocks.
        """

    def wire(self, digest: bytes) -> int:
        """A digest as events carry it."""

    def shown(self, tokens: Sequence[int]) -> tuple[ShownToken, ...]:
        """The tokens of some blocks, and `lookahead` more, as events carry them."""


def chain(
    tokens: Sequence[int], block_size: int, namespace: Namespace, hashing: Hashing
) -> Iterator[bytes]:
    """The digests of all full blocks of `tokens`, first to last."""
    parent = None
    for end in range(block_size + hashing.lookahead, len(tokens) + 1, block_size):
        start = end - block_size - hashing.lookahead
        parent = hashing.block_digest(parent, tokens[start:end], namespace)
        yield parent
