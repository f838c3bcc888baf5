"""Judges what is known of a request by itself, and what its engine counted; without side effects.

Whether its workers may get ids is another matter: `extproc.features.handing.handing` asks them.
"""

from collections.abc import Sequence
from functools import lru_cache

from extproc.features.handing.id_fields import PATHS
from extproc.observing.outcomes import Outcome
from extproc.proof.samples import AGREED, DISAGREED, FEWER, UNKNOWN
from extproc.requests.prompt import ASKED, IN_CODE, names_of
from extproc.requests.prompt import GIVEN as GIVEN_FORM
from extproc.requests.request import RoutingRequest
from extproc.routing.decision import Decision, Verdict
from extproc.routing.handing import (
    API,
    BODY,
    DIFFERS,
    FEW,
    GIVEN,
    LEGS,
    MEDIA,
    SEVERAL,
    TEXT,
    UNKEYED,
    UNPROVED,
)
from extproc.routing.inputs.query import Query

_OK = 200

# Forms that are not handed over: what engines render in code, and what workers tokenize.
_UNTRIED = IN_CODE | ASKED

# The longest prompt whose ids go along: a body stays below what Envoy holds by default.
MAX_TOKENS = 1_000_000


def is_placed(decision: Decision) -> bool:
    """Returns whether a request goes to a worker that is picked for it."""
    return decision.verdict is Verdict.STEER and bool(decision.pick) and decision.is_steered


def why_kept(
    decision: Decision, request: RoutingRequest, query: Query, least: int, *, writes_legs: bool
) -> str:
    """Returns why a request's ids stay here, by what is known of it alone; "" if they need not.

    least: shorter prompts have no use of it. writes_legs: whether the part of other workers is
    told in the body, and not in a header.
    """
    if query.media is not None:
        return MEDIA
    if not query.prompts:
        return UNKEYED
    if query.sole is None:
        return SEVERAL
    if not query.forms or query.forms & GIVEN_FORM:
        return GIVEN if query.reads_cache else TEXT
    return _why_unwritten(decision, request, query, least, writes_legs=writes_legs)


def _why_unwritten(
    decision: Decision, request: RoutingRequest, query: Query, least: int, *, writes_legs: bool
) -> str:
    """Returns the same for a keyed prompt that is alone."""
    has_parts = decision.prefill is not None or decision.source is not None
    reasons = (
        (FEW, not least <= len(query.prompts[0].tokens) <= MAX_TOKENS),
        (TEXT, query.needs_text),
        (UNPROVED, query.forms & _UNTRIED),
        (API, request.head.path not in PATHS),
        (DIFFERS, query.variants),
        (LEGS, has_parts and not writes_legs),
        (BODY, request.body is None),
    )
    return next((reason for reason, holds in reasons if holds), "")


@lru_cache(256)
def traits_of(forms: int, path: str, adapter: str | None) -> Sequence[str]:
    """Returns the traits of a request, by which samples are taken (`extproc.proof.samples`)."""
    found = [path, *names_of(forms)]
    return tuple(found if adapter is None else [*found, f"adapter {adapter}"])


def result_of(outcome: Outcome | None, tokens: int, block_tokens: int, *, is_sample: bool) -> str:
    """Returns what the counts of an engine show of a request's ids; only a sample can agree.

    Messages report a count in parts, and releases disagree on whether these overlap. Of what the
    worker certainly held, the last block may be computed again. tokens: of its only prompt.
    block_tokens: of a block of its worker.
    """
    counted = _counted(outcome)
    if outcome is None or counted is None:
        return UNKNOWN
    cached = outcome.reported.cached_tokens or 0
    is_in_parts = outcome.reported.form == "messages"
    counts = (counted, counted - cached) if is_in_parts else (counted,)
    if tokens not in counts:
        return DISAGREED
    if not is_sample:
        return UNKNOWN
    has_report = outcome.reported.cached_tokens is not None
    is_missed = has_report and outcome.predicted_tokens - cached > block_tokens
    return FEWER if is_missed else AGREED


def _counted(outcome: Outcome | None) -> int | None:
    """Returns how many tokens the engine of the pick counted in a prompt, None if unknown."""
    if outcome is None or outcome.is_moved or outcome.status not in (None, _OK):
        return None
    return outcome.reported.prompt_tokens if outcome.is_whole else None
