"""Compares a prompt with those of the conversations that it may continue: the part for a thread.

It takes milliseconds where prompts are long, so it runs apart, and only for prompts that do not
simply go on from a known one.
"""

from collections.abc import Callable, Sequence

import msgspec
from msgspec.structs import replace

from extproc.features.misses.change import KEPT_SHARE, Kind, difference, found_share, kind_of
from extproc.features.misses.locating import Spot, locate
from extproc.features.misses.verdicts import TEMPLATE, Change
from extproc.requests.parts import Part, Place
from extproc.routing.claims.ends import ASKING_TOKENS
from kvstate.overlap import Tokens, shared_tokens

# So many tokens of what changed are turned into text, to find the part that begins in it.
SHOWN_TOKENS = 256

# A change behind so many tokens is not placed in the request: all that is before it would have to
# be turned into text.
MOST_PLACED_TOKENS = 131_072

# So many tokens become text in less than a millisecond.
PIECE_TOKENS = 1_024

# Most conversations that a prompt is compared with, the latest.
MOST_COMPARED = 8

# Returns the text of tokens.
TextOf = Callable[[Tokens], str]


class Alike(msgspec.Struct, frozen=True, gc=False):
    """A conversation that a prompt may continue.

    number: of the conversation. tokens: its last prompt. is_named: whether the client's session has
    the same name. begun: how many tokens an earlier prompt of it had, with which the new one
    begins; 0 if it does not. turns: how many requests it had. is_apart: whether its session has
    another name, so that the new one may have forked from it, but does not continue it.
    agrees_on_tools: whether both have tools, or neither has.
    """

    number: int
    tokens: Tokens
    is_named: bool = False
    begun: int = 0
    turns: int = 1
    is_apart: bool = False
    agrees_on_tools: bool = True


class Match(msgspec.Struct, frozen=True, gc=False):
    """The conversation that a prompt continues.

    number: of the conversation, 0 if it goes on from an earlier prompt of one, as a sub-agent does.
    last: the tokens of the prompt from which it goes on. kept: how many of these it keeps. change:
    what changed behind them, None if nothing did.
    """

    number: int
    last: int
    kept: int
    change: Change | None = None


def match_of(
    new: Tokens, alike: Sequence[Alike], parts: Sequence[Part], text_of: TextOf | None
) -> Match | None:
    """Returns which conversation a prompt continues, None if it begins one.

    It continues one whose last prompt is found in it, the one with most of it. If none is, it may
    be one of the same session whose turns were all replaced, but not what is before them. Clients
    ask for a summary without the tools, and what differs then are these.

    text_of: None if the text of tokens is not known; then only token counts say what changed.
    """
    found = [_compared(new, one) for one in alike if not one.is_apart]
    best = max(found, key=_likeness, default=None)
    if best is not None and best.share >= KEPT_SHARE:
        return _matched(new, best, parts, text_of)
    forked = max((one.begun for one in alike), default=0)
    if forked:
        return Match(0, forked, forked)
    own = [one for one in found if one.alike.is_named and one.alike.agrees_on_tools]
    named = [one for one in own if one.alike.turns > 1]
    best = max(named, key=lambda one: one.kept, default=None)
    if best is None:
        return None
    match = _matched(new, best, parts, text_of)
    if match.change is None or match.change.place != Place.TURN:
        return None
    return replace(match, change=replace(match.change, kind=Kind.COMPACTION))


class _Compared(msgspec.Struct, frozen=True, gc=False):
    alike: Alike
    kept: int
    share: float


def _compared(new: Tokens, alike: Alike) -> _Compared:
    old = alike.tokens
    kept = shared_tokens(old, new)
    share = 1.0 if is_whole(old, kept) else found_share(old, new, kept)
    return _Compared(alike, kept, share)


def _likeness(one: _Compared) -> tuple[int, int]:
    """Returns how alike they are; the share is one of samples, and counts by eighths."""
    return round(one.share * 8), one.kept


def is_whole(old: Tokens, kept: int) -> bool:
    """Returns whether a prompt keeps all of an older one but for how that asks for its answer."""
    return kept >= len(old) - ASKING_TOKENS


def _matched(new: Tokens, best: _Compared, parts: Sequence[Part], text_of: TextOf | None) -> Match:
    old, kept, number = best.alike.tokens, best.kept, best.alike.number
    if is_whole(old, kept):
        return Match(number, kept, kept)
    change = change_of(old, new, kept, parts, text_of)
    if not best.alike.agrees_on_tools:
        has_now = any(one.place is Place.TOOLS for one in parts)
        change = Change(kept, Place.TOOLS, kind=Kind.INSERTED if has_now else Kind.REMOVED)
    return Match(number, len(old), kept, change)


def change_of(
    old: Tokens, new: Tokens, kept: int, parts: Sequence[Part], text_of: TextOf | None
) -> Change:
    """Returns what changed in a prompt behind the tokens that it shares with an older one."""
    if text_of is None or kept > MOST_PLACED_TOKENS:
        return Change(kept)
    seen = difference(old, new, kept)
    spot = _spot(new, kept, seen.come, parts, text_of)
    is_turn = spot.part is None or spot.part.place is Place.TURN
    kind = kind_of(seen, old, new, text_of, is_turn=is_turn, is_written=spot.is_written)
    if spot.part is None or kind is Kind.OPTION:
        return Change(kept, TEMPLATE, kind=kind)
    return Change(kept, spot.part.place, spot.part.index, spot.part.role, kind)


def _spot(new: Tokens, kept: int, come: int, parts: Sequence[Part], text_of: TextOf) -> Spot:
    """Returns which part of the request stands where it changed."""
    # in pieces: while tokens become text, the interpreter does nothing else
    pieces = range(0, kept, PIECE_TOKENS)
    before = "".join([text_of(new[at : min(at + PIECE_TOKENS, kept)]) for at in pieces])
    changed = text_of(new[kept : kept + min(come, SHOWN_TOKENS)])
    shown = text_of(new[kept + min(come, SHOWN_TOKENS) : kept + come + SHOWN_TOKENS])
    start = len(before)
    return locate(parts, before + changed + shown, start, start + len(changed))
