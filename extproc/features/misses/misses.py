"""Why prompts are computed again, as a feature: for each turn a verdict, when it has ended.

A turn that simply goes on from its conversation's last prompt is judged at once. Any other is
examined apart, in a thread: it may begin a conversation, or change one.

    last_prompts   what each conversation sent last
    comparing      which of these a prompt continues, and what changed (`change`, `locating`)
    whereabouts    what became of what workers held of it
    partition      each token of the prompt, by its cause
    verdicts       that of one turn, in numbers and words
    totals         those of all turns, by client; `breaks`: who breaks the cache
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from prometheus_client.registry import Collector

from extproc.base.errors import RequestError
from extproc.base.logs import log_fault
from extproc.config.schema import Config
from extproc.config.sections import MissSettings
from extproc.features.feature import Feature
from extproc.features.misses.client_kinds import ClientKinds
from extproc.features.misses.comparing import MOST_COMPARED, Alike, Match, match_of
from extproc.features.misses.examining import Examining
from extproc.features.misses.growth import Growth
from extproc.features.misses.last_prompts import LastPrompt, LastPrompts, Sent
from extproc.features.misses.miss_figures import MissFigures
from extproc.features.misses.naming import (
    NO_NAMES,
    Names,
    names_of,
    shown_tenant,
    whose_of,
)
from extproc.features.misses.partition import Cause, Held
from extproc.features.misses.sender import NOBODY, Sender
from extproc.features.misses.totals import Totals
from extproc.features.misses.verdicts import Verdict, as_json, told
from extproc.features.misses.whereabouts import why_elsewhere, why_gone
from extproc.features.router_parts import RouterParts
from extproc.observing.outcomes import Outcome
from extproc.requests.parts import Part, Place, Said, parts_of
from extproc.requests.request import RoutingRequest
from extproc.routing.claims.ends import ASKING_TOKENS
from extproc.routing.decision import Decision
from extproc.routing.inputs.query import Query
from kvstate.overlap import Overlap, Prompt

log = logging.getLogger("kvsteer.decision")

# Verdicts that are kept to be shown, the last ones.
MOST_VERDICTS = 512

# So many removals of each rank are remembered: a MiB.
REMOVALS = 65_536

# For so long after the start, or once conversations were dropped, one that is not known may be one
# that went on.
LEARNING_SECONDS = 3_600.0

# How verdicts were found: at once; in the thread; not, since the thread had too much to do.
AT_ONCE, EXAMINED, UNEXAMINED = "at_once", "examined", "unexamined"

_OK = 200

# So long after a request, events that its engine sent with it have come.
EVENTS_SECONDS = 1.0

# Roles, or types, of turns that a model wrote.
_ANSWERS = frozenset(("assistant", "function_call", "reasoning", "model"))
_USER_AGENT = "user-agent"


class _Turn(msgspec.Struct, eq=False):
    """One request between its decision and its verdict.

    last: its conversation, None while that is not known. sent: where its prompt goes. before: where
    the conversation's last prompt went, None if none is known. predicted: how many tokens its
    worker was to reuse. is_examined, is_ended, is_awaited: what its verdict waits for; the latter
    are events of its worker.
    """

    verdict: Verdict
    prompt: Prompt
    decision: Decision
    sent: Sent
    predicted: int
    last: LastPrompt | None = None
    before: Sent | None = None
    is_examined: bool = False
    is_ended: bool = False
    is_awaited: bool = False


class Misses(Feature):
    """Finds out why prompts are computed again. clock: seconds since 1970."""

    headers = (_USER_AGENT,)
    wants_named = True

    def __init__(
        self, rules: MissSettings, parts: RouterParts, clock: Callable[[], float] = time.time
    ) -> None:
        self._workers = parts.workers
        self._homes = parts.homes
        self._loads = parts.loads
        self._tokens = parts.tokens
        self._tells_clients = rules.response_headers
        self._clock = clock
        self._monotonic = parts.workers.monotonic
        self._began_at = self._monotonic()
        self.prompts = LastPrompts(rules.memory_bytes)
        self.totals = Totals(rules.worker_price_per_hour)
        self._clients = ClientKinds()
        self._growth: dict[str, Growth] = {}
        self._examining = Examining()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: dict[int, _Turn] = {}  # by the identity of their decisions
        self._verdicts: deque[Verdict] = deque(maxlen=MOST_VERDICTS)
        self._number = 0
        self._workers.followed.index.remember_removals(REMOVALS)

    def begin(self, request: RoutingRequest, query: Query, decision: Decision, now: float) -> None:
        """Judges a request whose prompt is keyed, or has it examined."""
        prompts = query.prompts
        if len(prompts) != 1 or not decision.pick or _is_beyond(query):
            return
        prompt, followed = prompts[0], decision.basis.belonging.turn
        turn = self._turn(request, query, prompt, decision, now)
        self._open[id(decision)] = turn
        self._workers.followed.index.note_time(now)
        found = self.prompts.ended_by(followed.follows) or self._find(decision, prompt)
        if found is None or found[1] != len(found[0].tokens):
            self._examine(request, query, turn, found)
            return
        self._go_on(turn, found[0], followed.keys)
        turn.is_examined = True
        self.totals.ways[AT_ONCE] += 1

    def _turn(
        self,
        request: RoutingRequest,
        query: Query,
        prompt: Prompt,
        decision: Decision,
        now: float,
    ) -> _Turn:
        self._number += 1
        basis, worker, count = decision.basis, decision.worker, len(prompt.tokens)
        claims, reused = basis.claims.get(worker), basis.certain_tokens
        if claims is not None and claims.speculative > reused:
            reused = claims.speculative
        speed = self._loads.tokens_per_second(decision.pick[0])
        verdict = Verdict(
            self._number,
            self._clock(),
            request.head.request_id,
            NOBODY,
            worker,
            0,
            1,
            Held(count, min(count, reused), self._workers.candidates.block_size(worker) or 1),
            None,
            "",
            1 / speed if speed else 0.0,
        )
        return _Turn(verdict, prompt, decision, Sent(worker, now), reused)

    def _find(self, decision: Decision, prompt: Prompt) -> tuple[LastPrompt, int] | None:
        """Returns the conversation that a prompt goes on from, and from how many tokens of it.

        Those whose worker has lost its cache are found as well.
        """
        if not decision.marks:
            return None
        ends = self._homes.ends_in(decision.marks[0], prompt.tokens)
        return next(filter(None, map(self.prompts.ended_by, ends)), None)

    def _go_on(self, turn: _Turn, last: LastPrompt, keys: Sequence[int]) -> None:
        """Judges a turn that goes on from the last prompt of its conversation."""
        old, new = last.tokens, turn.prompt.tokens
        kept = len(old)
        asked = kept - ASKING_TOKENS
        if old[asked:] != new[asked:kept]:  # what asked for the answer differs
            kept = max(0, asked)
            while kept < len(new) and old[kept] == new[kept]:
                kept += 1
        self._judge(turn, last, kept, kept)
        turn.last = last
        self.prompts.go_on(last, new, turn.sent, keys[0] if keys else 0)

    def _judge(self, turn: _Turn, last: LastPrompt, length: int, kept: int) -> None:
        """Judges a turn of a known conversation.

        length: the tokens of its last prompt. kept: those that both have.
        """
        verdict, before = turn.verdict, last.sent
        held = verdict.held
        held.last, held.kept = length, kept
        verdict.sender = last.sender
        turn.before = before
        if held.is_lacking:
            self._say_why(turn, before)
        verdict.conversation, verdict.turn = last.conversation, last.turns + 1
        self._note_growth(turn)

    def _note_growth(self, turn: _Turn, times: int = 1) -> None:
        """Notes what a turn adds to its worker's cache. times: -1 takes that back."""
        verdict = turn.verdict
        held, worker = verdict.held, verdict.worker
        growth = self._growth.get(worker) or self._growth_of(worker)
        growth.add(verdict.sender, times * (held.prompt - held.reused), turn.sent.at)

    def _growth_of(self, worker: str) -> Growth:
        """Returns the growth of a worker that is new; forgets those of workers that are gone."""
        records = self._workers.records
        self._growth = {name: one for name, one in self._growth.items() if name in records}
        return self._growth.setdefault(worker, Growth())

    def _say_why(self, turn: _Turn, before: Sent) -> None:
        """Says why the worker of a turn lacks what its conversation keeps of its last prompt."""
        verdict, worker = turn.verdict, turn.sent.worker
        held, is_same = verdict.held, worker == before.worker
        is_known = is_same and verdict.is_reported
        there = held.reused if is_known else _tokens_of(turn.decision, before.worker)
        held.elsewhere = 0 if is_same else there
        held.gone, because = self._why_gone(before, turn, there)
        tokens = verdict.tokens
        if tokens.get(Cause.ELSEWHERE, 0) > tokens.get(held.gone, 0):
            because = why_elsewhere(turn.decision, before.worker, worker)
        verdict.because = because

    def _why_gone(self, before: Sent, turn: _Turn, there: int) -> tuple[Cause, str]:
        """Returns why a conversation's worker holds only so many tokens of a prompt."""
        record = self._workers.records.get(before.worker)
        return why_gone(
            before,
            turn.prompt,
            there,
            turn.verdict.held.block,
            None if record is None else record.holdings,
            self._workers.followed.blocks.removed_at,
            self._growth,
            self._clock() - self._monotonic(),
        )

    def _examine(
        self,
        request: RoutingRequest,
        query: Query,
        turn: _Turn,
        found: tuple[LastPrompt, int] | None,
    ) -> None:
        """Has a request examined in the thread, if that has room."""
        verdict, body = turn.verdict, request.body or b""
        client = self._clients.kind_of(request.named.get(_USER_AGENT, ()))
        verdict.sender = Sender(query.model or "", client, shown_tenant(request.tenant))
        if not body or not self._examining.admit(len(body)):
            self._begin_conversation(turn, NO_NAMES, 0, is_known=False)
            self._settle_examination(turn, UNEXAMINED)
            return
        session = request.head.session or query.session
        asked = self._examined(body, whose_of(request, query), session, turn, found)
        task = asyncio.get_running_loop().create_task(asked)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _examined(
        self,
        body: bytes,
        whose: int,
        session: str,
        turn: _Turn,
        found: tuple[LastPrompt, int] | None,
    ) -> None:
        try:
            said = await self._examining.run(partial(_said, body), len(body))
            names = names_of(said.parts, whose, session or said.session)
            await self._match(turn, said.parts, names, whose, found)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request goes on without
            turn.verdict.held.beginning = Cause.UNKNOWN
            log_fault(log, "examining a prompt failed with %s", error)
        finally:
            self._examining.leave(len(body))
            self._settle_examination(turn, EXAMINED)

    async def _match(
        self,
        turn: _Turn,
        parts: Sequence[Part],
        names: Names,
        whose: int,
        found: tuple[LastPrompt, int] | None,
    ) -> None:
        """Finds the conversation of a turn, or begins one."""
        alike = self.prompts.find_alike(names.all)
        known = {} if found is None else {found[0].number: found[0]}
        known |= {
            one.number: one
            for one in alike
            if one.whose == whose and not names.are_apart_from(one.session)
        }
        compared = [_alike(one, names, found) for one in known.values()][:MOST_COMPARED]
        text_of = self._tokens.text_of(turn.verdict.sender.model)
        work = partial(match_of, turn.prompt.tokens, compared, parts, text_of)
        match = await self._examining.run(work) if compared else None
        if match is not None and match.number:
            self._follow(turn, known[match.number], match, names)
            return
        has_begun = any(one.role in _ANSWERS for one in parts) or not parts
        is_known = match is not None or not has_begun
        self._begin_conversation(turn, names, whose, is_known=is_known)
        if match is not None:
            held = turn.verdict.held
            held.last, held.kept = match.last, match.kept

    def _follow(self, turn: _Turn, last: LastPrompt, match: Match, names: Names) -> None:
        """Judges a turn of a known conversation that may have changed, and remembers its prompt."""
        verdict, tokens, change = turn.verdict, turn.prompt.tokens, match.change
        verdict.change = change
        keys = turn.decision.basis.belonging.turn.keys
        key = keys[0] if keys else 0
        self._judge(turn, last, match.last, match.kept)
        if change is None or change.place == Place.TURN:
            self.prompts.go_on(last, tokens, turn.sent, key)
        else:
            older = last
            last = LastPrompt(0, tokens, turn.sent, verdict.sender, older.whose)
            self.prompts.change(last, key, older)
        turn.last = last
        last.session, last.has_tools = names.session or last.session, names.has_tools
        self.prompts.note_names(last, names.all)

    def _begin_conversation(self, turn: _Turn, names: Names, whose: int, *, is_known: bool) -> None:
        """Judges a turn whose conversation is not known, and remembers its prompt.

        is_known: whether it is known to begin with it. A conversation that has answers may have
        begun before the router did, or was dropped from memory.
        """
        verdict, keys = turn.verdict, turn.decision.basis.belonging.turn.keys
        is_old = self._monotonic() - self._began_at >= LEARNING_SECONDS
        if not (is_known or (is_old and not self.prompts.dropped)):
            verdict.held.beginning = Cause.UNKNOWN
        last = LastPrompt(0, turn.prompt.tokens, turn.sent, verdict.sender, whose)
        turn.last = self.prompts.begin(last, keys[0] if keys else 0)
        verdict.conversation, last.session = last.number, names.session
        last.has_tools = names.has_tools
        self._note_growth(turn)
        self.prompts.note_names(last, names.all)

    def _settle_examination(self, turn: _Turn, way: str) -> None:
        self.totals.ways[way] += 1
        turn.is_examined = True
        self._finish(turn)

    def note_server(self, decision: Decision, endpoint: str) -> None:
        """Takes which endpoint answered."""
        turn, worker = self._open.get(id(decision)), decision.basis.worker_at(endpoint)
        if turn is not None and worker not in ("", turn.sent.worker):
            self._move(turn, worker)

    def respond(self, decision: Decision) -> Sequence[tuple[str, str]]:
        """Returns what a client is told of its own last prompt, if clients are told.

        Nothing if that was not stored, since what others stored would show; and nothing if the
        proxy chose the worker, of which nothing is known yet.
        """
        turn = self._open.get(id(decision)) if self._tells_clients else None
        if turn is None or not turn.is_examined or not decision.is_steered:
            return ()
        is_stored = turn.before is None or turn.before.is_stored
        return told(turn.verdict) if is_stored else ()

    def note_end(
        self, decision: Decision, outcome: Outcome | None, *, is_booked: bool, is_sent: bool
    ) -> None:
        """Takes what the engine reported of a request, and counts its verdict."""
        turn = self._open.pop(id(decision), None)
        if turn is None:
            return
        turn.is_ended = True
        turn.sent.is_stored = is_sent
        if outcome is not None and is_sent:
            turn.sent.is_stored = outcome.status in (None, _OK)
            if outcome.worker not in ("", turn.sent.worker):
                self._move(turn, outcome.worker)
            self._take_report(turn, outcome)
        self._finish(turn)

    def _move(self, turn: _Turn, worker: str) -> None:
        """Takes that another worker than the pick answered: what that held counts."""
        verdict, overlaps = turn.verdict, turn.decision.basis.overlaps
        held = verdict.held
        if turn.is_examined:
            self._note_growth(turn, -1)
        turn.sent.worker = verdict.worker = worker
        overlap = overlaps[0].get(worker) if overlaps else None
        certain = 0 if overlap is None else overlap.certain_tokens
        turn.predicted = held.reused = min(certain, held.prompt)
        verdict.because = ""
        if turn.is_examined:
            self._note_growth(turn)
        if turn.before is not None and held.is_lacking:
            self._say_why(turn, turn.before)

    def _take_report(self, turn: _Turn, outcome: Outcome) -> None:
        """Takes what the engine of the answering worker reported."""
        verdict, cached = turn.verdict, outcome.reported.cached_tokens
        if cached is None or not outcome.is_comparable or not outcome.is_whole:
            return
        verdict.is_reported = True
        held = verdict.held
        if cached != held.reused:
            held.reused = min(cached, held.prompt)
        if turn.before is None:
            return
        if not held.is_lacking:
            verdict.because = ""
            return
        if cached + held.block <= turn.predicted:
            # it went between the decision and the engine's step, or the feed was behind
            held.gone = Cause.UNKNOWN
        if held.gone is Cause.UNKNOWN and verdict.tokens.get(Cause.UNKNOWN):
            self._say_why(turn, turn.before)
            if held.gone is Cause.UNKNOWN:  # what tells it may still be on its way
                turn.is_awaited = True
                loop = asyncio.get_running_loop()
                loop.call_later(EVENTS_SECONDS, self._look_last, turn, turn.before)

    def _look_last(self, turn: _Turn, before: Sent) -> None:
        self._say_why(turn, before)
        turn.is_awaited = False
        self._finish(turn)

    def _finish(self, turn: _Turn) -> None:
        """Counts the verdict of a turn that has ended and was examined, if it was computed."""
        is_due = turn.is_examined and turn.is_ended and not turn.is_awaited
        if is_due and turn.sent.is_stored:
            self._verdicts.append(turn.verdict)
            self.totals.count(turn.verdict)

    def collectors(self) -> Sequence[Collector]:
        """Returns what shows the figures of verdicts."""
        return (MissFigures(self.totals, self.prompts),)

    def as_json(self) -> dict[str, Any]:
        """Returns the answer of GET /misses, without the turns."""
        return {
            "enabled": True,
            "seconds": round(self._monotonic() - self._began_at),
            "conversations": len(self.prompts),
            "memory_bytes": self.prompts.bytes,
            **self.totals.as_json(),
        }

    def turns_as_json(
        self, request_id: str, conversation: int, most: int
    ) -> Iterator[dict[str, Any]]:
        """Yields the last verdicts, the latest last.

        request_id, conversation: whose are shown alone; all for "" and 0. most: how many at most.
        """
        shown: Iterable[Verdict] = self._verdicts
        if request_id:
            shown = [one for one in shown if one.request_id == request_id]
        if conversation:
            shown = [one for one in shown if one.conversation == conversation]
        kept = list(shown)
        return map(as_json, kept[max(0, len(kept) - most) :])


def _said(body: bytes) -> Said:
    try:
        return parts_of(body)
    except RequestError:
        return Said()


def _is_beyond(query: Query) -> bool:
    """Returns whether it is not looked for what became of a request's tokens."""
    media = query.media
    return query.answers != 1 or not query.reads_cache or (media is not None and not media.is_whole)


def _alike(one: LastPrompt, names: Names, found: tuple[LastPrompt, int] | None) -> Alike:
    is_named = bool(names.session) and names.session in one.names
    begun = found[1] if found is not None and found[0] is one else 0
    return Alike(
        one.number,
        one.tokens,
        is_named=is_named,
        begun=begun,
        turns=one.turns,
        is_apart=names.are_apart_from(one.session),
        agrees_on_tools=None in (names.has_tools, one.has_tools)
        or names.has_tools == one.has_tools,
    )


def _tokens(overlap: Overlap | None) -> int:
    return 0 if overlap is None else overlap.certain_tokens + overlap.uncertain_tokens


def _tokens_of(decision: Decision, worker: str) -> int:
    overlaps = decision.basis.overlaps
    return _tokens(overlaps[0].get(worker)) if overlaps else 0


def misses(config: Config, parts: RouterParts) -> Misses | None:
    """Returns the feature if it is enabled."""
    return Misses(config.misses, parts) if config.misses.enabled else None
