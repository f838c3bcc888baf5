"""Belonging: which worker a request's conversation belongs to, and what it holds there.

It is the worker with the response that the request continues, since any other would answer with an
error. Else it is the one to which the conversation's last request went, by its tokens or texts, or
by the session that the client names. A session that is not known here prefers two workers that
every router computes alike. All but the first only prefer a worker: load may move any request.

Where tokens are known, so is what each worker holds of them: then only moves are priced by where a
conversation is (`extproc.routing.cost.room`), and no worker is credited with more than it holds.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import msgspec

from extproc.requests.request import RoutingRequest
from extproc.requests.tenant_salt import name_apart
from extproc.routing.claims.claim_table import Expected
from extproc.routing.claims.ends import end_of_text, ends_in_text
from extproc.routing.claims.homes import HOME_TOKENS, NO_TURN, Homes, Turn
from extproc.routing.claims.live_contexts import Context
from extproc.routing.claims.marks import MARKS_PER_OCTAVE, Marks, unpacked
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.savings.sessions import MAX_SESSION_LETTERS, session_credit
from kvstate.overlap import Prompt

# Why a request belongs to a worker.
RESPONSE, CONVERSATION, SESSION = "response", "conversation", "session"


class Belonging(msgspec.Struct, frozen=True):
    """The workers that a request prefers beyond what they hold.

    credit: by how many tokens in all, by name, the best first; empty if it prefers none. by: why,
    "" for no reason. turn: what is remembered of the request on the worker that gets it. home: the
    worker that got the conversation's request before it, "" if none is known, or if it may not
    answer while tokens are not known. counted: what the conversation counts for there now, None if
    it does not. begins: whether the conversation has no worker: it begins, or none holds half of
    what is its own.
    """

    credit: Mapping[str, float] = {}
    by: str = ""
    turn: Turn = NO_TURN
    home: str = ""
    counted: Context | None = None
    begins: bool = False

    @property
    def sole(self) -> str:
        """The name of the only worker that can answer, "" if others can."""
        return next(iter(self.credit)) if self.by == RESPONSE else ""


NOWHERE = Belonging()


def belonging_of(
    request: RoutingRequest,
    query: Query,
    marks: Sequence[Marks],
    places: Sequence[int],
    snapshot: Snapshot,
    sent: Sequence[Mapping[str, Expected]],
    saved: Mapping[str, float],
    weighed: float,
    now: float,
) -> Belonging:
    """Returns which workers a request prefers, of those at these places among the snapshot's.

    Ejected workers are left out unless all are ejected. sent: what was sent of each prompt to each
    worker. saved: the tokens that workers are expected to save, by name. weighed: those of the
    whole prompt.
    """
    homes = snapshot.homes
    if not query.reads_cache:
        return NOWHERE
    if query.prompts and (query.media is None or query.media.is_whole):
        if homes is None or len(query.prompts) != 1 or not marks:
            return NOWHERE
        return _of_tokens(query.prompts[0], marks[0], homes, sent[0], saved, weighed, now)
    # by address, since routers with different sources may name workers differently
    names = {one.endpoint: one.name for one in map(snapshot.workers.__getitem__, places)}
    if homes is not None and query.previous:
        previous = name_apart(request.tenant, query.previous)
        home = homes.find_worker((homes.key(RESPONSE, None, None, previous),), now)
        if home in names.values():
            credit = {home: saved.get(home, 0.0) + HOME_TOKENS}
            return Belonging(credit, RESPONSE, Turn(_keys_of(marks)))
    return _of_texts(
        request, query, marks, names, snapshot, sent[0] if sent else {}, saved, weighed, now
    )


def _of_texts(
    request: RoutingRequest,
    query: Query,
    marks: Sequence[Marks],
    names: Mapping[str, str],
    snapshot: Snapshot,
    sent: Mapping[str, Expected],
    saved: Mapping[str, float],
    weighed: float,
    now: float,
) -> Belonging:
    """Returns to which worker a request belongs whose tokens are not known.

    names: those of the workers that may answer, by endpoint.
    """
    homes, keys = snapshot.homes, _keys_of(marks)
    sound = [endpoint for endpoint in names if endpoint not in snapshot.ejected] or list(names)
    session = _session_of(request, query)
    if homes is not None:
        home, follows = homes.find(ends_in_text(marks[0]), now) if marks else ("", 0)
        by = CONVERSATION
        if session:
            named = homes.key(SESSION, query.model, query.lora, session)
            keys = (*keys, named)
            if not home:
                (home, follows), by = homes.find((named,), now), SESSION
        if home in [names[endpoint] for endpoint in sound]:
            credit = _at_home(home, query, snapshot, saved, weighed)
            if by == SESSION:  # its texts are new there, so a shared system elsewhere is no reason
                credit = {home: max(credit[home], max(saved.values(), default=0.0) + HOME_TOKENS)}
            turn = Turn(keys, follows, homes.grown(follows, weighed))
            return Belonging(credit, by, turn, home, homes.counted(follows, now))
    begins = homes is not None and bool(keys)
    most = max(saved.values(), default=0.0)
    turn = Turn(keys, 0, _begun(marks, sent, most, weighed))
    if not session:
        return Belonging(turn=turn, begins=begins)
    percent = snapshot.rules.cost.uncertain_percent
    shares = session_credit(session, sound, weighed)
    found = {names[endpoint]: tokens * percent / 100 for endpoint, tokens in shares.items()}
    return Belonging(found, SESSION if found else "", turn, begins=begins)


def _of_tokens(
    prompt: Prompt,
    marks: Marks,
    homes: Homes,
    sent: Mapping[str, Expected],
    saved: Mapping[str, float],
    weighed: float,
    now: float,
) -> Belonging:
    """Returns to which worker a request belongs whose tokens are known.

    What no request shares that was sent of late is its own, also if its conversation is not known:
    after a restart, conversations stay where they are held.
    """
    end = homes.end_of(marks, prompt.tokens)
    if end is None:
        return NOWHERE
    home, follows = homes.find(homes.ends_in(marks, prompt.tokens), now)
    most = max(saved.values(), default=0.0)
    begun = None if follows else _begun((marks,), sent, most, weighed)
    context = begun or homes.grown(follows, weighed)
    turn = Turn((end.key,), follows, context, end)
    common = context.begun_with
    begins = most - common < (weighed - common) / 2
    return Belonging({}, "", turn, home, homes.counted(follows, now), begins)


def _begun(
    marks: Sequence[Marks], sent: Mapping[str, Expected], most: float, weighed: float
) -> Context:
    """Returns what a conversation holds that is not known: it shares what was sent before.

    sent: what was sent of it to each worker, to within a mark. most: the tokens that any worker
    would save.
    """
    shared = float(max([approximate for _, approximate in sent.values()], default=0))
    shared = min(weighed, most if shared + shared / MARKS_PER_OCTAVE >= most else shared)
    place = bisect_right(marks[0].lengths, shared) - 1 if marks else -1
    if place < 0:
        return Context(weighed)
    return Context(weighed - shared, shared, unpacked(marks[0].keys)[place])


def _keys_of(marks: Sequence[Marks]) -> tuple[int, ...]:
    """Returns the key of the end of a conversation known as text, none if it is too short."""
    end = end_of_text(marks[0]) if marks else None
    return () if end is None else (end.key,)


def _session_of(request: RoutingRequest, query: Query) -> str:
    """Returns the session that a header or the body names, of its own tenant; "" for none."""
    session = request.head.session or query.session
    if not 0 < len(session) <= MAX_SESSION_LETTERS:
        return ""
    return name_apart(request.tenant, session)


def _at_home(
    home: str, query: Query, snapshot: Snapshot, saved: Mapping[str, float], weighed: float
) -> dict[str, float]:
    """Returns by how many tokens a conversation's worker is preferred.

    If the request was not read, nobody knows what the worker holds of it.
    """
    held = saved.get(home, 0.0)
    if query.outline is None:
        held = max(held, weighed * snapshot.rules.cost.uncertain_percent / 100)
    return {home: held + HOME_TOKENS}
