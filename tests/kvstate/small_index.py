"""An index of one trusted rank of worker w and model m, with its events and prompts."""

from kvstate.events import BlockHash, BlocksStored
from kvstate.index.index import Index
from kvstate.index.owner import IndexLimits, Owner
from kvstate.overlap import Extra, Overlap, Prompt, Tokens
from tests.kvstate.cores import new_index


def an_index(limits: IndexLimits | None = None) -> tuple[Index, Owner]:
    index = new_index(limits=limits)
    owner = index.add("w", 0, "m")
    owner.trusted = True
    return index, owner


def stored(
    hashes: list[BlockHash],
    ids: list[int],
    parent: BlockHash | None = None,
    *,
    medium: str = "GPU",
    lora: str | int | None = None,
    extras: list[Extra] | None = None,
) -> BlocksStored:
    size = len(ids) // len(hashes)
    return BlocksStored(hashes, parent, Tokens("I", ids), size, lora, extras, medium)


def prompt(*ids: int, lora: str | None = None, salt: str | None = None) -> Prompt:
    return Prompt("m", Tokens("I", ids), lora, salt)


def tiers(index: Index, asked: Prompt, worker: str = "w") -> tuple[int, int, int, int]:
    return index.overlaps(asked).get(worker, Overlap(1)).tiers
