"""The recorded feeds of tests/wire, and a simple replay of their events."""

import base64
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstate.overlap import Tokens

WIRE = Path(__file__).parents[1] / "wire"
FEEDS = sorted(path.stem for path in WIRE.glob("*.jsonl"))

# Names of the fields of tagged arrays, as vLLM's message classes declare them.
STORED = (
    "type",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
)
REMOVED = ("type", "block_hashes", "medium", "group_idx")


@dataclass
class Frame:
    """One recorded message: its frames as bytes, and its payload in readable form."""

    frames: list[bytes]
    sequence: int
    decoded: list[Any]

    @property
    def events(self) -> list[dict[str, Any]]:
        """The decoded events, by field names whatever the layout."""
        return [_named(event) for event in self.decoded[1]]


@dataclass
class Request:
    """One recorded request and the messages that arrived because of it."""

    scenario: str
    tokens: list[int] | None  # None where there is no single prompt
    salt: str | None
    lora: str | None
    cached_tokens: int | None
    frames: list[Frame]


def records(name: str) -> Iterator[dict[str, Any]]:
    """All lines of a recording."""
    with (WIRE / f"{name}.jsonl").open() as lines:
        yield from map(json.loads, lines)


def requests(name: str) -> list[Request]:
    """The requests of a recording, in their order."""
    return [_request(record) for record in records(name) if record["kind"] == "request"]


def replays(name: str) -> dict[str, list[list[bytes]]]:
    """The recorded answers to replays: by scenario, every message as frames."""
    return {
        record["scenario"]: [
            [base64.b64decode(frame) for frame in message["full_b64"]]
            for message in record["received"]
        ]
        for record in records(name)
        if record["kind"] == "replay"
    }


@dataclass
class Replayed:
    """What a worker holds by the decoded events: copies, parent and path of each hash."""

    copies: Counter[int | str] = field(default_factory=Counter)
    parents: dict[int | str, int | str | None] = field(default_factory=dict)
    paths: dict[int | str, list[int]] = field(default_factory=dict)
    spaces: dict[int | str, tuple[str | None, str | None]] = field(default_factory=dict)
    blocks: dict[tuple[int, ...], set[int | str]] = field(default_factory=dict)  # by path
    lengths: set[int] = field(default_factory=set)  # of paths
    chains: dict[int | str, list[int | str]] = field(default_factory=dict)  # since the last event

    def apply(self, event: dict[str, Any]) -> None:
        """Applies one event."""
        self.chains.clear()
        hashes = [_readable(block) for block in event.get("block_hashes", [])]
        if event["type"] == "AllBlocksCleared":
            self.copies.clear()
        elif event["type"] == "BlockRemoved":
            self.copies.subtract(hashes)
        else:
            self._store(event, hashes)

    def chain(self, block: int | str) -> list[int | str]:
        """The hashes from the first block of a prompt to this one."""
        if block not in self.chains:
            parent = self.parents[block]
            self.chains[block] = [block] if parent is None else [*self.chain(parent), block]
        return self.chains[block]

    def overlap(self, tokens: list[int], lora: str | None, salt: str | None) -> int:
        """How many leading blocks of a prompt without its last token are held."""
        prompt = tuple(tokens)
        chains = [
            self.chain(block)
            for end in self.lengths
            if end < len(prompt)
            for block in self.blocks.get(prompt[:end], ())
        ]
        held = [
            len(chain)
            for chain in chains
            if self.spaces[chain[0]] == (lora, salt)
            and all(self.copies[link] > 0 for link in chain)
        ]
        return max(held, default=0)

    def _store(self, event: dict[str, Any], hashes: list[int | str]) -> None:
        size = event["block_size"]
        parent = event["parent_block_hash"]
        parent = None if parent is None else _readable(parent)
        extras = event.get("extra_keys") or [None] * len(hashes)
        lora = event.get("lora_name")
        first, tokens = split_tokens(event["token_ids"])
        for position, block in enumerate(hashes):
            self.copies[block] += 1
            self.parents[block] = parent
            before = first if parent is None else self.paths[parent]
            if block in self.paths:
                self.blocks[tuple(self.paths[block])].discard(block)
            self.paths[block] = before + tokens[position * size :][:size]
            self.blocks.setdefault(tuple(self.paths[block]), set()).add(block)
            self.lengths.add(len(self.paths[block]))
            keys = [key for key in extras[position] or [] if key != lora]
            self.spaces[block] = (lora, keys[0] if keys else event.get("cache_salt"))
            parent = block


def _request(record: dict[str, Any]) -> Request:
    body = record.get("body") or {}
    model = body.get("model")
    usage = ((record.get("response") or {}).get("usage") or {}) if body else {}
    details = usage.get("prompt_tokens_details") or {}
    return Request(
        scenario=record["scenario"],
        tokens=record.get("prompt_token_ids"),
        salt=body.get("cache_salt") or record.get("extra", {}).get("cache_salt"),
        lora=None if model in (None, "tiny") else model,
        cached_tokens=details.get("cached_tokens"),
        frames=[_frame(frame) for frame in record["frames"]],
    )


def _frame(record: dict[str, Any]) -> Frame:
    frames = [
        bytes.fromhex(record["topic_hex"]),
        bytes.fromhex(record["seq_hex"]),
        base64.b64decode(record["payload_b64"]),
    ]
    return Frame(frames, record["seq"], record["decoded"])


def _named(event: Any) -> dict[str, Any]:
    if isinstance(event, dict):
        return event
    return dict(zip(STORED if event[0] == "BlockStored" else REMOVED, event, strict=False))


def _readable(block: Any) -> int | str:
    if isinstance(block, dict):
        return str(block["__hex__"])
    return int(block) % 2**64  # SGLang's are signed


def split_tokens(ids: list[Any]) -> tuple[list[int], list[int]]:
    """The very first token of bigrams (else none), and the tokens that the blocks add."""
    if isinstance(ids[0], list):
        return [ids[0][0]], [second for _, second in ids]
    return [], ids


def tokens_of(ids: list[int]) -> Tokens:
    """Token ids in the index's type."""
    return Tokens("I", ids)
