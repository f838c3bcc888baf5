"""The recordings that any router can be judged by: what a real engine was asked, and what it did.

Each request has the cached tokens that the engine reported, and the events that it published
because of it (tests/wire/README.md). Pure but for reading the file.
"""

import base64
import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measure  # noqa: F401 - before the packages that it needs
import msgspec

WIRE = Path(__file__).resolve().parents[1] / "tests" / "wire"

MODEL = "tiny"

Event = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """One message of an engine: as it was sent, and decoded."""

    payload: bytes
    content: Sequence[Any]

    @property
    def events(self) -> Sequence[Event]:
        """The events in it."""
        found: Sequence[Event] = self.content[1]
        return found

    def only(self, events: Sequence[Event]) -> bytes:
        """Returns the message with these of its events: as it was sent, if it is all of them."""
        if list(events) == list(self.events):
            return self.payload
        return msgspec.msgpack.encode([self.content[0], events, *self.content[2:]])


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A request and what the engine made of it.

    response: its answer. tokens: its prompt, as the engine tokenized it. cached: tokens, as the
    engine reported. session: the number of its conversation. block_size: tokens a block.
    """

    path: str
    body: Mapping[str, Any]
    response: Mapping[str, Any]
    tokens: Sequence[int]
    salt: str | None
    cached: int
    session: int
    block_size: int
    batches: Sequence[Batch]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """All requests to one engine, in their order."""

    name: str
    dialect: str
    engine_version: str
    block_size: int
    requests: Sequence[Recorded]


# The dialects are those of kvtools/simulator, for all that was not recorded.
RECORDINGS: Mapping[str, tuple[str, str, int]] = {
    "vllm_0.32.0_cached_tokens.jsonl": ("vllm-0.32", "0.32.0", 32),
    "vllm_0.33.0_eagle.jsonl.gz": ("vllm-0.32", "0.33.0", 32),
    "sglang_0.5.23_cached_tokens.jsonl.gz": ("sglang-0.5.22", "0.5.23", 16),
}


def recordings() -> list[Recording]:
    """Reads all of them."""
    return [read(name) for name in RECORDINGS]


def read(name: str) -> Recording:
    """Reads one of RECORDINGS."""
    dialect, version, block_size = RECORDINGS[name]
    found = tuple(_with_sessions(_records(WIRE / name), block_size))
    return Recording(
        name=name.partition(".jsonl")[0],
        dialect=dialect,
        engine_version=version,
        block_size=block_size,
        requests=found,
    )


def _records(path: Path) -> Iterator[dict[str, Any]]:
    packed = path.read_bytes()
    lines = gzip.decompress(packed) if path.suffix == ".gz" else packed
    for line in lines.splitlines():
        record = json.loads(line)
        if record["kind"] == "request":
            yield record


def _with_sessions(records: Iterator[dict[str, Any]], block_size: int) -> Iterator[Recorded]:
    """A request continues the earlier one of whose whole blocks its prompt begins with the most."""
    earlier: dict[tuple[str | None, tuple[int, ...]], int] = {}
    sessions = 0
    for record in records:
        tokens, salt = record["prompt_token_ids"], record["body"].get("cache_salt")
        ends = range(len(tokens) // block_size * block_size, 0, -block_size)
        begun = (earlier.get((salt, tuple(tokens[:end]))) for end in ends)
        session = next((one for one in begun if one is not None), None)
        if session is None:
            session, sessions = sessions, sessions + 1
        earlier[salt, tuple(tokens[: ends.start])] = session
        details = record["response"]["usage"].get("prompt_tokens_details") or {}
        yield Recorded(
            path=record["path"],
            body={**record["body"], "model": MODEL},
            response=record["response"],
            tokens=tokens,
            salt=salt,
            cached=details.get("cached_tokens") or 0,
            session=session,
            block_size=block_size,
            batches=[_batch(frame["payload_b64"]) for frame in record["frames"]],
        )


def _batch(encoded: str) -> Batch:
    payload = base64.b64decode(encoded)
    return Batch(payload, msgspec.msgpack.decode(payload))
