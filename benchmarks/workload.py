"""The workload of the index benchmark: the workers' blocks, the prompts, and the events.

Every worker holds 10,000 blocks of 16 tokens: a system prompt of 64 blocks, two documents of 2,048
blocks, the beginning of a third (each worker more of it than the one before), and its own chats.
Everything follows from a seed, so that two processes create the same workload.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

if TYPE_CHECKING:
    Tokens: TypeAlias = array[int]
else:
    Tokens = array

MODEL = "model"
BLOCK_SIZE = 16
VOCABULARY = 130_000

BLOCKS_PER_WORKER = 10_000
SYSTEM_BLOCKS = 64
DOCUMENT_BLOCKS = 2_048

# Full blocks of a prompt of 1k, 8k and 32k tokens. A prompt has one token more, which engines
# always compute, so that all its full blocks count.
PROMPT_BLOCKS = {"1k": 64, "8k": 512, "32k": 2_048}
PROMPTS = 40
PARTLY_HELD = range(3, PROMPTS, 3)  # their numbers; the others are fully held somewhere


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive blocks, each with an engine hash, after `parent` or at the start of a prompt."""

    hashes: Sequence[int]
    tokens: Tokens
    parent: "Piece | None" = None

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def whole(self) -> Tokens:
        """All tokens from the start of the prompt."""
        return self.tokens if self.parent is None else self.parent.whole + self.tokens

    def cut(self, blocks: int) -> "Piece":
        """Returns its first blocks."""
        return Piece(self.hashes[:blocks], self.tokens[: blocks * BLOCK_SIZE], self.parent)


@dataclass(frozen=True, slots=True)
class Workload:
    """The blocks of each worker, in the order of storing, and the prompts by size."""

    held: list[list[Piece]]
    prompts: dict[str, list[Tokens]]


class Source:
    """Random pieces, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)

    def tokens(self, count: int) -> Tokens:
        """Returns token ids, evenly distributed over the vocabulary."""
        words = memoryview(self._rng.randbytes(4 * count)).cast("I")
        return array("I", [word % VOCABULARY for word in words])

    def piece(self, blocks: int, parent: Piece | None = None) -> Piece:
        """Returns new blocks."""
        hashes = memoryview(self._rng.randbytes(8 * blocks)).cast("Q").tolist()
        return Piece(hashes, self.tokens(blocks * BLOCK_SIZE), parent)

    def shuffled(self, items: Sequence[Any]) -> list[Any]:
        """Returns the items in random order."""
        return self._rng.sample(items, len(items))

    def between(self, low: float, high: float) -> float:
        """Returns a random number between two."""
        return self._rng.uniform(low, high)


def build(workers: int, seed: int = 1) -> Workload:
    """Returns the whole workload for this many workers."""
    source = Source(seed)
    system = source.piece(SYSTEM_BLOCKS)
    documents = [source.piece(DOCUMENT_BLOCKS) for _ in range(3)]
    held = [_worker(source, system, documents, (n + 1) / workers) for n in range(workers)]
    chats = [piece for pieces in held for piece in pieces[4:]]
    prompts = {
        size: _prompts(source, documents, chats, blocks) for size, blocks in PROMPT_BLOCKS.items()
    }
    return Workload(held, prompts)


def _worker(source: Source, system: Piece, documents: Sequence[Piece], share: float) -> list[Piece]:
    """Returns the blocks of one worker: its part of the third document, and chats of every size."""
    *whole, staggered = documents
    pieces = [system, *whole, staggered.cut(int(DOCUMENT_BLOCKS * share))]
    left = BLOCKS_PER_WORKER - sum(map(len, pieces))
    lengths = [PROMPT_BLOCKS["32k"], *[PROMPT_BLOCKS["8k"]] * 3]
    for length in lengths:
        pieces.append(source.piece(length - SYSTEM_BLOCKS, system))
        left -= len(pieces[-1])
    while left:
        pieces.append(source.piece(min(left, PROMPT_BLOCKS["1k"])))
        left -= len(pieces[-1])
    return pieces


def _prompts(
    source: Source, documents: Sequence[Piece], chats: Sequence[Piece], blocks: int
) -> list[Tokens]:
    """Returns prompts of this many blocks: most of them fully held by a worker, the others partly.

    They alternate between beginnings, so that no two in a row begin alike.
    """
    size = blocks * BLOCK_SIZE
    wholes = [document.tokens for document in documents]
    wholes += [chat.whole for chat in chats if len(chat.whole) == size][: PROMPTS - len(wholes)]
    wholes = source.shuffled([whole[:size] for whole in wholes])
    return [_prompt(source, wholes[n % len(wholes)], n in PARTLY_HELD) for n in range(PROMPTS)]


def _prompt(source: Source, whole: Tokens, partly: bool) -> Tokens:
    """Returns a prompt of this length plus one token; one partly held continues differently."""
    held = int(source.between(0.1, 0.9) * len(whole)) if partly else len(whole)
    return whole[:held] + source.tokens(len(whole) - held + 1)


def stored(piece: Piece, start: int = 0, stop: int | None = None) -> dict[str, Any]:
    """Returns an event that stores blocks of a piece, as vLLM 0.32 publishes it."""
    hashes = list(piece.hashes[start:stop])
    tokens = piece.tokens[start * BLOCK_SIZE : (start + len(hashes)) * BLOCK_SIZE]
    parent = piece.hashes[start - 1] if start else piece.parent and piece.parent.hashes[-1]
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens.tolist(),
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * len(hashes),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def removed(block: int) -> dict[str, Any]:
    """Returns an event that removes one block, as vLLM 0.32 publishes it."""
    return {"type": "BlockRemoved", "block_hashes": [block], "medium": "GPU", "group_idx": 0}


def message(events: Sequence[dict[str, Any]]) -> bytes:
    """Returns the payload of one message."""
    return msgspec.msgpack.encode([1_795_219_118.25, events, 0])


def messages(pieces: Sequence[Piece]) -> Iterator[bytes]:
    """Returns one message for each piece."""
    return (message([stored(piece)]) for piece in pieces)
