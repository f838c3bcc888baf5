"""Judges verdicts by the truth: whether they name the right cause and place. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.misses.planting import Change
from tests.misses.truth import Truth

Verdict = Mapping[str, Any]


class Judged(NamedTuple):
    """How a verdict stands to the truth.

    cause: whether it names the right one. position: whether it says at which token and in which
    part the prompt leaves the one before, or that it does not. kind: whether it says what changed
    there. tokens: whether all of them are counted right. says: what is wrong, "" if nothing is.
    """

    cause: bool
    position: bool
    kind: bool
    tokens: bool
    says: str = ""

    @property
    def is_right(self) -> bool:
        """Whether cause, position and kind are right."""
        return self.cause and self.position and self.kind


def judged(verdict: Verdict, truth: Truth, change: Change | None) -> Judged:
    """Judges the verdict on a turn. change: where its prompt leaves the one before."""
    told = verdict["change"]
    return Judged(
        cause=verdict["cause"] == truth.cause,
        position=_is_at(told, truth, change),
        kind=(told is None) if change is None else (told or {}).get("kind") in change.kinds,
        tokens=dict(verdict["tokens"]) == dict(truth.tokens),
        says=_difference(verdict, truth, change),
    )


def adds_up(verdict: Verdict) -> bool:
    """Whether the tokens of all causes are those of the prompt."""
    return bool(sum(verdict["tokens"].values()) == verdict["prompt_tokens"])


def _is_at(told: Verdict | None, truth: Truth, change: Change | None) -> bool:
    if change is None:
        return told is None
    if told is None or (told["at_token"], told["part"]) != (truth.kept, change.part):
        return False
    return not change.indices or told["index"] in change.indices


def _difference(verdict: Verdict, truth: Truth, change: Change | None) -> str:
    told = verdict["change"]
    found = []
    if verdict["cause"] != truth.cause:
        found.append(f"cause {verdict['cause']!r}, not {truth.cause!r}")
    if dict(verdict["tokens"]) != dict(truth.tokens):
        found.append(f"tokens {dict(verdict['tokens'])}, not {dict(truth.tokens)}")
    kind = None if told is None else told["kind"]
    if not _is_at(told, truth, change) or (change is not None and kind not in change.kinds):
        found.append(f"change {told}, not {change} at {truth.kept}")
    return "; ".join(found)


@dataclass
class Score:
    """The verdicts on one cause's turns."""

    turns: int = 0
    cause: int = 0
    position: int = 0
    right: int = 0
    kind: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, one: Judged, name: str) -> None:
        """Counts a verdict. name: of the play, for what is wrong."""
        self.turns += 1
        self.cause += one.cause
        self.position += one.position
        self.right += one.is_right
        self.kind += one.kind
        self.tokens += one.tokens
        if one.says:
            self.wrong.append(f"{name}: {one.says}")

    @property
    def is_enough(self) -> bool:
        """Whether all three are right in at least nineteen of twenty."""
        return self.right * 20 >= self.turns * 19


Scores = Mapping[str, Score]

_HEAD = ("", "turns", "cause", "position", "kind", "all three", "all tokens")


def table(scores: Scores) -> str:
    """One line for each cause: of its turns, how many verdicts are right."""
    lines = [_HEAD, *(_cells(name, one) for name, one in scores.items())]
    widths = [max(len(line[at]) for line in lines) for at in range(len(_HEAD))]
    return "\n".join(_line(line, widths) for line in lines)


def _cells(name: str, one: Score) -> tuple[str, ...]:
    counts = (one.turns, one.cause, one.position, one.kind, one.right, one.tokens)
    return (name, *map(str, counts))


def _line(cells: Iterable[str], widths: list[int]) -> str:
    first, *others = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(text.rjust(width) for text, width in others)])
