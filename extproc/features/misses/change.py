"""How a prompt differs from the one before it, by kind and without its texts."""

import re
from collections.abc import Callable
from enum import StrEnum

import msgspec

from extproc.routing.claims.ends import ASKING_TOKENS
from kvstate.overlap import Tokens

# So many tokens in a row are looked for in the other prompt.
WINDOW = 16

# At most so many places of a prompt are looked for in the other one.
MOST_PLACES = 64

# So many tokens around a change are looked at.
AROUND = 12

# A change of more tokens is no time or number.
FEW_TOKENS = 64

# If less of the last prompt's rest is found again, it is another conversation's.
KEPT_SHARE = 0.25

# If less of it is found in a prompt that is shorter, or not its end, its turns were replaced.
REPLACED_SHARE = 0.5

# Of what follows a common beginning, so many tokens are looked at.
MOST_TOKENS = 131_072

_BYTES_PER_TOKEN = 4
_DIGITS = re.compile(r"\d+")
_TIME = re.compile(
    r"\d{1,2}:\d{2}"
    r"|\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}"
    r"|\b(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.? \d{1,2}"
    r"|\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*\b"
    r"|\b1[5-9]\d{8}(?:\d{3})?\b"
)
_NAME = re.compile(r"[0-9A-Za-z-]*\d[0-9A-Za-z-]*")


class Kind(StrEnum):
    """What changed at the first token at which two prompts differ."""

    TIME = "time"
    NUMBER = "number"
    IDENTIFIER = "identifier"
    INSERTED = "inserted"
    REMOVED = "removed"
    MOVED = "moved"
    REWRITTEN = "rewritten"
    COMPACTION = "compaction"
    THINKING = "thinking"
    OPTION = "option"


class Difference(msgspec.Struct, frozen=True, gc=False):
    """How two prompts differ behind their common beginning.

    kept: the tokens of that. gone, come: how many tokens behind it the old one had, and the new one
    has, until both go on alike; all if they do not. is_moved: whether what begins there in each is
    found later in the other. kept_share: how much of the old one's rest is found in the new one.
    keeps_end: whether what the old one ends with is found there, as it is if the conversation goes
    on.
    """

    kept: int
    gone: int
    come: int
    is_moved: bool
    kept_share: float
    keeps_end: bool

    @property
    def is_small(self) -> bool:
        """Whether no more changed than a time or a number has."""
        return max(self.gone, self.come) <= FEW_TOKENS


def difference(old: Tokens, new: Tokens, kept: int) -> Difference:
    """Returns how a prompt differs from an older one with which it shares its first tokens."""
    older, rest = _behind(old, kept), _behind(new, kept)
    gone, come = _meeting(old, new, kept, rest)
    begins_later = _find(rest, older[: WINDOW * _BYTES_PER_TOKEN]) > 0
    was_later = _find(older, rest[: WINDOW * _BYTES_PER_TOKEN]) > 0
    share = _found_share(older, rest)
    ending = _last(old, kept)[-WINDOW * _BYTES_PER_TOKEN :]
    keeps_end = not ending or _find(_last(new, kept), ending) >= 0
    return Difference(kept, gone, come, begins_later and was_later, share, keeps_end)


def found_share(old: Tokens, new: Tokens, kept: int) -> float:
    """Returns how much of an older prompt's rest is found in a newer one's, from 0 to 1."""
    return _found_share(_behind(old, kept), _behind(new, kept))


def _behind(tokens: Tokens, kept: int) -> bytes:
    """Returns the bytes of the tokens that follow the first ones."""
    return tokens[kept : kept + MOST_TOKENS].tobytes()


def _last(tokens: Tokens, kept: int) -> bytes:
    """Returns the bytes of the last tokens behind the first ones, but for those that ask."""
    end = len(tokens) - ASKING_TOKENS
    return tokens[max(kept, end - MOST_TOKENS) : max(kept, end)].tobytes()


def kind_of(
    seen: Difference,
    old: Tokens,
    new: Tokens,
    text_of: Callable[[Tokens], str],
    *,
    is_turn: bool,
    is_written: bool,
) -> Kind:
    """Returns what changed. text_of: returns the text of tokens.

    is_turn: whether the change begins in a turn. is_written: whether the client wrote what is
    there; otherwise its template did.
    """
    at = seen.kept
    is_cut = seen.kept_share < REPLACED_SHARE or not seen.keeps_end
    is_replaced = is_turn and len(new) < len(old) and is_cut
    if seen.is_moved or is_replaced:
        return Kind.MOVED if seen.is_moved else Kind.COMPACTION
    if seen.is_small and not is_written:
        return Kind.OPTION
    if not seen.come:
        removed = text_of(old[at : at + min(seen.gone, FEW_TOKENS)])
        return Kind.THINKING if is_turn and "<think" in removed else Kind.REMOVED
    if not (seen.gone and seen.is_small):
        return Kind.REWRITTEN if seen.gone else Kind.INSERTED
    start = max(0, at - AROUND)
    return _kind_of_texts(
        text_of(old[start : at + seen.gone + AROUND]), text_of(new[start : at + seen.come + AROUND])
    )


def _kind_of_texts(before: str, now: str) -> Kind:
    """Returns what a few words that changed are, each with what is around it."""
    if set(_TIME.findall(before)) != set(_TIME.findall(now)):
        return Kind.TIME
    if _DIGITS.sub("0", before) == _DIGITS.sub("0", now):
        return Kind.NUMBER
    if _NAME.sub("0", before) == _NAME.sub("0", now):
        return Kind.IDENTIFIER
    return Kind.REWRITTEN


def _meeting(old: Tokens, new: Tokens, kept: int, rest: bytes) -> tuple[int, int]:
    """Returns how many tokens are between the common beginning and where both go on alike."""
    left = len(old) - kept
    step = 1
    at = 0
    for _ in range(MOST_PLACES):
        if at + WINDOW > left:
            break
        window = old[kept + at : kept + at + WINDOW].tobytes()
        place = _find(rest, window)
        if place >= 0:
            gone, come = at, place
            while gone and come and old[kept + gone - 1] == new[kept + come - 1]:
                gone, come = gone - 1, come - 1
            return gone, come
        at += step
        step = max(1, at // 8)
    return left, len(new) - kept


def _found_share(older: bytes, rest: bytes) -> float:
    """Returns how much of some tokens, taken at regular places, is found in others."""
    size = WINDOW * _BYTES_PER_TOKEN
    count = min(MOST_PLACES // 4, max(1, len(older) // size))
    step = max(1, (len(older) - size) // (count * _BYTES_PER_TOKEN)) * _BYTES_PER_TOKEN
    places = range(0, len(older) - size + 1, step)[:count]
    found = sum([_find(rest, older[at : at + size]) >= 0 for at in places])
    return found / len(places) if places else 0.0


def _find(rest: bytes, window: bytes) -> int:
    """Returns the place of tokens in others, in tokens; -1 if they are not there."""
    if len(window) < _BYTES_PER_TOKEN:
        return -1
    at = rest.find(window)
    while at >= 0 and at % _BYTES_PER_TOKEN:
        at = rest.find(window, at + 1)
    return at // _BYTES_PER_TOKEN if at >= 0 else -1
