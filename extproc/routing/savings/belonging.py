"""Belonging: which worker a request's conversation belongs to, while its tokens are not known.

It is the worker with the response that the request continues, since any other would answer with an
error. Else it is the one to which the conversation's last request went, by its texts, or by the
session that the client names. A session that is not known here prefers two workers that every
router computes alike. All but the first only prefer a worker: load may move any request.
"""

from collections.abc import Mapping, Sequence

import msgspec

from extproc.requests.request import RoutingRequest
from extproc.requests.tenant_salt import name_apart
from extproc.routing.claims.homes import HOME_TOKENS, end_of, ends_in
from extproc.routing.claims.marks import Marks
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.savings.sessions import MAX_SESSION_LETTERS, session_credit

# Why a request belongs to a worker.
RESPONSE, CONVERSATION, SESSION = "response", "conversation", "session"


class Belonging(msgspec.Struct, frozen=True):
    """The workers that a request prefers beyond what they hold.

    credit: by how many tokens in all, by name, the best first; empty if it prefers none. by: why,
    "" for no reason. keys: under which the request is remembered on the worker that gets it.
    follows: the key of the conversation's request before it, 0 if none is known. home: the worker
    that got that request, "" if it may not answer. is_new: whether the request may begin a
    conversation that will be followed.
    """

    credit: Mapping[str, float] = {}
    by: str = ""
    keys: tuple[int, ...] = ()
    follows: int = 0
    home: str = ""
    is_new: bool = False

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
    saved: Mapping[str, float],
    weighed: float,
    now: float,
) -> Belonging:
    """Returns which workers a request prefers, of those at these places among the snapshot's.

    Ejected workers are left out unless all are ejected. saved: the tokens that workers are expected
    to save, by name. weighed: those of the whole prompt.
    """
    is_keyed = query.prompts and (query.media is None or query.media.is_whole)
    if is_keyed or not query.reads_cache:
        return NOWHERE
    homes = snapshot.homes
    # by address, since routers with different sources may name workers differently
    names = {one.endpoint: one.name for one in map(snapshot.workers.__getitem__, places)}
    sound = [endpoint for endpoint in names if endpoint not in snapshot.ejected] or list(names)
    able = frozenset([names[endpoint] for endpoint in sound])
    session = _session_of(request, query)
    keys = end_of(marks[0]) if marks else ()
    follows = 0
    if homes is not None:
        if query.previous:
            previous = name_apart(request.tenant, query.previous)
            home = homes.find_worker((homes.key(RESPONSE, None, None, previous),), now)
            if home in names.values():
                return Belonging({home: saved.get(home, 0.0) + HOME_TOKENS}, RESPONSE, keys)
        home, follows = homes.find(ends_in(marks[0]), now) if marks else ("", 0)
        by = CONVERSATION
        if session:
            named = homes.key(SESSION, query.model, query.lora, session)
            keys = (*keys, named)
            if not home:
                (home, follows), by = homes.find((named,), now), SESSION
        if home in able:
            credit = _at_home(home, query, snapshot, saved, weighed)
            if by == SESSION:  # its texts are new there, so a shared system elsewhere is no reason
                credit = {home: max(credit[home], max(saved.values(), default=0.0) + HOME_TOKENS)}
            return Belonging(credit, by, keys, follows, home)
    is_new = homes is not None and bool(keys)
    if not session:
        return Belonging(by="", keys=keys, follows=follows, is_new=is_new)
    percent = snapshot.rules.cost.uncertain_percent
    credit = session_credit(session, sound, weighed)
    found = {names[endpoint]: tokens * percent / 100 for endpoint, tokens in credit.items()}
    by = SESSION if found else ""
    return Belonging(found, by, keys, follows, is_new=is_new)


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
