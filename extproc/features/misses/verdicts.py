"""The verdict of a turn: what became of each token of its prompt, and why, in numbers and words."""

from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec.structs import replace

from extproc.features.misses.change import Kind
from extproc.features.misses.partition import Cause, Held, Tokens, main_cause, partition
from extproc.features.misses.sender import Sender
from extproc.requests.parts import Place

# Where a change stands if the client did not write what is there.
TEMPLATE = "template"

_KINDS = {
    Kind.TIME: "a date or time changed",
    Kind.NUMBER: "a number changed",
    Kind.IDENTIFIER: "an identifier changed",
    Kind.INSERTED: "something was inserted",
    Kind.REMOVED: "something was removed",
    Kind.MOVED: "items stand in another order",
    Kind.REWRITTEN: "the text was rewritten",
    Kind.COMPACTION: "the turns were replaced (compaction, or a new conversation of that session)",
    Kind.THINKING: "the thinking of earlier turns was left out",
    Kind.OPTION: "the template wrote something else (another option, such as the effort)",
}


class Change(msgspec.Struct, frozen=True, gc=False):
    """The first token at which a prompt differs from the conversation's last one.

    at: how many tokens are before it. place: tools, system, turn or template, "" if it was not
    looked at. index: of the tool or turn, from 0; None if that is not known. role: of the turn.
    kind: None if it was not looked at.
    """

    at: int
    place: str = ""
    index: int | None = None
    role: str = ""
    kind: Kind | None = None

    @property
    def where(self) -> str:
        """The place in words."""
        number = "" if self.index is None else f" {self.index + 1}"
        words = {
            Place.TOOLS: f"tool{number}",
            Place.SYSTEM: "the system prompt",
            Place.TURN: f"turn{number}" + (f" ({self.role})" if self.role else ""),
            TEMPLATE: "what the template writes",
        }
        named = words.get(self.place, "")
        return f"token {self.at}" + (f", in {named}" if named else "")

    @property
    def in_words(self) -> str:
        """Where it changed, and what."""
        what = "the prompt changed" if self.kind is None else _KINDS[self.kind]
        return f"at {self.where}, {what}"


class Verdict(msgspec.Struct, eq=False):
    """What became of the prompt of one request.

    number: of the verdict, from 1. at: seconds since 1970. conversation: its number, 0 if it is not
    known. turn: which of its requests it is, from 1. held: what is known of its tokens. because:
    more of the main cause, in words. seconds: how long its worker takes for a token.
    is_reported: whether the engine said how many were reused; otherwise it is what the worker
    certainly held at the pick.
    """

    number: int
    at: float
    request_id: str
    sender: Sender
    worker: str
    conversation: int
    turn: int
    held: Held
    change: Change | None = None
    because: str = ""
    seconds: float = 0.0
    is_reported: bool = False

    @property
    def tokens(self) -> Tokens:
        """How many tokens there are of each cause."""
        return partition(self.held)

    @property
    def cause(self) -> Cause | None:
        """Why most of what was computed again was."""
        return main_cause(self.tokens)


def in_words(verdict: Verdict) -> str:
    """Returns what an operator is told of a turn."""
    tokens, held = verdict.tokens, verdict.held
    reused = tokens.get(Cause.REUSED, 0)
    parts = [f"{reused:,} of {held.prompt:,} prompt tokens were reused"]
    if verdict.change is not None and tokens.get(Cause.CHANGED):
        again = tokens[Cause.CHANGED]
        parts.append(f"{verdict.change.in_words}, so {again:,} tokens were computed again")
    for cause, words in _WORDS.items():
        if tokens.get(cause):
            said = f"{tokens[cause]:,} {words}"
            is_main = verdict.because and cause is _because_of(tokens)
            parts.append(f"{said} ({verdict.because})" if is_main else said)
    if tokens.get(Cause.NEW):
        parts.append(f"{tokens[Cause.NEW]:,} are new")
    return "; ".join(parts)


_WORDS = {
    Cause.BLOCK: "are behind the last whole block",
    Cause.FIRST: "are of a conversation that begins",
    Cause.EVICTED: "were evicted",
    Cause.ELSEWHERE: "are held by another worker",
    Cause.RESTARTED: "were lost as the worker's engine started anew",
    Cause.CLEARED: "were lost as the worker's cache was cleared",
    Cause.GONE: "were held by a worker that is gone",
    Cause.NOT_STORED: "were not stored, since the request before failed",
    Cause.UNKNOWN: "were computed for a reason that is not known",
}


def _because_of(tokens: Tokens) -> Cause | None:
    """Returns the cause of which `because` says more: the main one besides a change."""
    return main_cause({cause: n for cause, n in tokens.items() if cause is not Cause.CHANGED})


# What a client is told.
OVERLAP_HEADER, MISS_HEADER = "x-kvsteer-overlap-tokens", "x-kvsteer-miss"


def told(verdict: Verdict) -> list[tuple[str, str]]:
    """Returns the headers that tell a client of its own last prompt.

    Nothing in them depends on what others have cached: of a conversation that begins it is told
    nothing.
    """
    held, change = verdict.held, verdict.change
    if held.last is None:
        return []
    overlap = min(held.reused, held.kept)
    tokens = partition(replace(held, reused=overlap))
    found, cause = [(OVERLAP_HEADER, str(overlap))], main_cause(tokens)
    if cause is not None:
        said = f"{cause.value}; tokens={tokens[cause]}"
        if change is not None and cause is Cause.CHANGED:
            said += f"; at={change.at}; part={change.place or 'unknown'}"
            said += "" if change.index is None else f"; index={change.index}"
            said += "" if change.kind is None else f"; kind={change.kind.value}"
        found.append((MISS_HEADER, said))
    return found


def as_json(verdict: Verdict) -> dict[str, Any]:
    """Returns one entry of `turns` in GET /misses."""
    change, cause = verdict.change, verdict.cause
    return {
        "number": verdict.number,
        "at": round(verdict.at, 3),
        "request_id": verdict.request_id,
        "conversation": verdict.conversation,
        "turn": verdict.turn,
        **verdict.sender._asdict(),
        "worker": verdict.worker,
        "prompt_tokens": verdict.held.prompt,
        "tokens": {key.value: count for key, count in verdict.tokens.items()},
        "reported": verdict.is_reported,
        "cause": "" if cause is None else cause.value,
        "because": verdict.because,
        "last_tokens": verdict.held.last,
        "kept_tokens": verdict.held.kept,
        "change": None if change is None else change_as_json(change),
        "says": in_words(verdict),
    }


def change_as_json(change: Change) -> dict[str, Any]:
    """Returns a change as GET /misses shows it."""
    return {
        "at_token": change.at,
        "part": change.place,
        "index": change.index,
        "role": change.role,
        "kind": None if change.kind is None else change.kind.value,
    }


def clock_time(at: float) -> str:
    """Returns the time of day in UTC. at: seconds since 1970."""
    return datetime.fromtimestamp(at, UTC).strftime("%H:%M:%S")
