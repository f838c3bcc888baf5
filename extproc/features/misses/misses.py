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
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

import msgspec
import xxhash
from msgspec.structs import replace
from prometheus_client.registry import Collector

from extproc.base.errors import RequestError
from extproc.base.logs import log_fault
from extproc.config.schema import Config
from extproc.config.sections import MissSettings
from extproc.features.feature import Feature
from extproc.features.misses.client_kinds import ClientKinds
from extproc.features.misses.comparing import Alike, Match, match_of
from extproc.features.misses.examining import Examining
from extproc.features.misses.growth import Growth
from extproc.features.misses.last_prompts import LastPrompt, LastPrompts
from extproc.features.misses.miss_figures import MissFigures
from extproc.features.misses.partition import Cause, Held
from extproc.features.misses.totals import Totals
from extproc.features.misses.verdicts import Verdict, as_json, told
from extproc.features.misses.whereabouts import why_elsewhere, why_gone
from extproc.features.router_parts import RouterParts
from extproc.observing.outcomes import Outcome
from extproc.requests.parts import Part, Place, Said, parts_of
from extproc.requests.request import RoutingRequest
from extproc.requests.tenant_salt import Tenant, name_apart
from extproc.requests.trusted_headers import TrustedHeaders
from extproc.routing.claims.ends import ASKING_TOKENS
from extproc.routing.decision import Decision
from extproc.routing.inputs.query import Query
from kvstate.overlap import Overlap, Prompt

log = logging.getLogger("kvsteer.decision")

# Verdicts that are kept to be shown, the last ones.
MOST_VERDICTS = 512

# So many removals of each rank are remembered: a MiB.
REMOVALS = 65_536

# By so many first turns a conversation is found whose beginning has changed; shorter turns are
# those of too many.
NAMING_TURNS = 4
LEAST_CHARACTERS = 16

# For so long after the start, or once conversations were dropped, one that is not known may be one
# that went on.
LEARNING_SECONDS = 3_600.0

# How verdicts were found: at once; in the thread; not, since the thread had too much to do.
AT_ONCE, EXAMINED, UNEXAMINED = "at_once", "examined", "unexamined"

_OK = 200

# Roles, or types, of turns that a model wrote.
_ANSWERS = frozenset(("assistant", "function_call", "reasoning", "model"))
_USER_AGENT = "user-agent"


class Names(msgspec.Struct, frozen=True):
    """Names under which a conversation is found: its session's, 0 for none, and its turns'."""

    session: int = 0
    turns: tuple[int, ...] = ()

    @property
    def all(self) -> tuple[int, ...]:
        """Returns all names."""
        return (self.session, *self.turns) if self.session else self.turns


NO_NAMES = Names()


class _Turn(msgspec.Struct, eq=False):
    """One request between its decision and its verdict.

    last: its conversation, None while that is not known. before: the same as it was before.
    is_examined, is_ended: what its verdict waits for. predicted: how many tokens its worker was to
    reuse.
    """

    verdict: Verdict
    prompt: Prompt
    decision: Decision
    predicted: int
    last: LastPrompt | None = None
    before: LastPrompt | None = None
    is_examined: bool = False
    is_ended: bool = False
    is_stored: bool = True


class Misses(Feature):
    """Finds out why prompts are computed again. clock: seconds since 1970."""

    headers = (_USER_AGENT,)

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
        self._growth: defaultdict[str, Growth] = defaultdict(Growth)
        self._examining = Examining()
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: dict[int, _Turn] = {}  # by the identity of their decisions
        self._verdicts: deque[Verdict] = deque(maxlen=MOST_VERDICTS)
        self._number = 0
        self._workers.followed.index.remember_removals(REMOVALS)

    def describe(self, request: RoutingRequest, named: TrustedHeaders) -> RoutingRequest:
        """Returns a request with the kind of its client."""
        kind = self._clients.kind_of(named.get(_USER_AGENT, ()))
        return replace(request, client=kind)

    def begin(self, request: RoutingRequest, query: Query, decision: Decision, now: float) -> None:
        """Judges a request whose prompt is keyed, or has it examined."""
        prompt = query.sole
        is_whole_prompt = query.media is None or query.media.is_whole
        if prompt is None or not decision.pick or not is_whole_prompt or not query.reads_cache:
            return
        turn = self._turn(request, query, prompt, decision)
        self._open[id(decision)] = turn
        self._note_growth(turn, now)
        found = self._find(decision, prompt)
        if found is not None and self._goes_on(turn, *found, now):
            self._settle_examination(turn, AT_ONCE)
            return
        self._examine(request, query, turn, found, now)

    def _turn(
        self, request: RoutingRequest, query: Query, prompt: Prompt, decision: Decision
    ) -> _Turn:
        self._number += 1
        basis, count = decision.basis, len(prompt.tokens)
        claimed = basis.claims_on(decision.worker).speculative
        reused = min(count, max(basis.certain_tokens, claimed))
        block = max(1, self._workers.candidates.block_size(decision.worker))
        speed = self._loads.tokens_per_second(decision.pick[0])
        held = Held(count, reused, block, elsewhere=_elsewhere(decision))
        verdict = Verdict(
            self._number,
            self._clock(),
            request.head.request_id,
            query.model or "",
            request.client,
            shown_tenant(request.tenant),
            decision.worker,
            0,
            1,
            held,
            seconds=1 / speed if speed else 0.0,
        )
        return _Turn(verdict, prompt, decision, reused)

    def _note_growth(self, turn: _Turn, now: float) -> None:
        verdict = turn.verdict
        sender = verdict.client + (f" (tenant {verdict.tenant})" if verdict.tenant else "")
        new = verdict.held.prompt - verdict.held.reused
        self._growth[verdict.worker].add(sender, new, now)

    def _find(self, decision: Decision, prompt: Prompt) -> tuple[LastPrompt, int] | None:
        """Returns the conversation that a prompt goes on from, and from how many tokens of it."""
        follows = decision.basis.belonging.turn.follows
        if follows:
            found = self.prompts.find_end((follows,))
            if found is not None:
                return found
        if not decision.marks:
            return None
        return self.prompts.find_end(self._homes.ends_in(decision.marks[0], prompt.tokens))

    def _goes_on(self, turn: _Turn, last: LastPrompt, begun: int, now: float) -> bool:
        """Judges a turn that goes on from the last prompt of its conversation; False if not."""
        old, new = last.tokens, turn.prompt.tokens
        if begun != len(old):
            return False
        kept = max(0, begun - ASKING_TOKENS)
        most = min(begun, len(new))
        while kept < most and old[kept] == new[kept]:
            kept += 1
        self._continue(turn, last, Match(last.number, kept, kept), now)
        return True

    def _continue(self, turn: _Turn, last: LastPrompt, match: Match, now: float) -> None:
        """Judges a turn of a known conversation, and remembers its prompt."""
        verdict, decision = turn.verdict, turn.decision
        held = replace(verdict.held, last=match.last, kept=match.kept)
        if decision.worker == last.worker:  # that others hold it as well explains nothing
            held = replace(held, elsewhere=0)
        usable = min(match.kept, held.prompt - 1) // held.block * held.block
        if held.reused < usable:
            held = self._say_why(turn, last, held, usable)
        verdict.held, verdict.change = held, match.change
        verdict.conversation, verdict.turn = last.number, last.turns + 1
        turn.last, turn.before = last, replace(last)
        self.prompts.go_on(last, turn.prompt.tokens, decision.worker, now)
        self.prompts.note_end(last, _end_key(decision))

    def _say_why(self, turn: _Turn, last: LastPrompt, held: Held, usable: int) -> Held:
        """Says why a worker lacks what a conversation keeps of its last prompt."""
        decision, verdict = turn.decision, turn.verdict
        if held.elsewhere > held.reused:
            verdict.because = why_elsewhere(decision, last.worker)
        if max(held.reused, held.elsewhere) < usable:
            gone, because = self._why_gone(last, turn, _tokens_of(decision, last.worker))
            held = replace(held, gone=gone)
            verdict.because = verdict.because or because
        return held

    def _why_gone(self, last: LastPrompt, turn: _Turn, there: int) -> tuple[Cause, str]:
        """Returns why a conversation's worker holds only so many tokens of a prompt."""
        record = self._workers.records.get(last.worker)
        return why_gone(
            last,
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
        now: float,
    ) -> None:
        """Has a request examined in the thread, if that has room."""
        body = request.body or b""
        if not body or not self._examining.admit(len(body)):
            self._begin_conversation(turn, NO_NAMES, now, is_known=False)
            self._settle_examination(turn, UNEXAMINED)
            return
        task = asyncio.get_running_loop().create_task(
            self._examined(body, _whose(request, query), _session(request, query), turn, found, now)
        )
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _examined(
        self,
        body: bytes,
        whose: int,
        session: str,
        turn: _Turn,
        found: tuple[LastPrompt, int] | None,
        now: float,
    ) -> None:
        try:
            said = await self._examining.run(partial(_said, body))
            names = names_of(said.parts, whose, session or said.session)
            await self._match(turn, said.parts, names, whose, found, now)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request goes on without
            turn.verdict.held = replace(turn.verdict.held, beginning=Cause.UNKNOWN)
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
        now: float,
    ) -> None:
        """Finds the conversation of a turn, or begins one."""
        alike = self.prompts.find_alike(names.all)
        known = {one.number: one for one in alike if one.whose == whose}
        begun = 0
        if found is not None:
            known.setdefault(found[0].number, found[0])
            begun = found[1]
        compared = [
            Alike(
                one.number,
                one.tokens,
                is_named=bool(names.session) and names.session in one.names,
                begun=begun if found is not None and one is found[0] else 0,
                turns=one.turns,
            )
            for one in known.values()
        ]
        text_of = self._tokens.text_of(turn.verdict.model)
        work = partial(match_of, turn.prompt.tokens, compared, parts, text_of)
        match = await self._examining.run(work) if compared else None
        if match is None:
            has_begun = any(one.role in _ANSWERS for one in parts) or not parts
            last = self._begin_conversation(turn, names, now, is_known=not has_begun)
        elif match.number:
            last = known[match.number]
            self._continue(turn, last, match, now)
            self.prompts.note_names(last, names.all)
        else:
            last = self._begin_conversation(turn, names, now, is_known=True)
            held = replace(turn.verdict.held, last=match.last, kept=match.kept)
            turn.verdict.held = held
        last.whose = whose

    def _begin_conversation(
        self, turn: _Turn, names: Names, now: float, *, is_known: bool
    ) -> LastPrompt:
        """Judges a turn whose conversation is not known, and remembers its prompt.

        is_known: whether it is known to begin with it. A conversation that has answers may have
        begun before the router did, or was dropped from memory.
        """
        verdict = turn.verdict
        is_old = self._monotonic() - self._began_at >= LEARNING_SECONDS
        if not (is_known or (is_old and not self.prompts.dropped)):
            verdict.held = replace(verdict.held, beginning=Cause.UNKNOWN)
        turn.last = last = self.prompts.begin(
            LastPrompt(0, turn.prompt.tokens, turn.decision.worker, now, client=verdict.client)
        )
        verdict.conversation = last.number
        self.prompts.note_end(last, _end_key(turn.decision))
        self.prompts.note_names(last, names.all)
        return last

    def _settle_examination(self, turn: _Turn, way: str) -> None:
        self.totals.count_way(way)
        turn.is_examined = True
        self._finish(turn)

    def respond(self, decision: Decision) -> Sequence[tuple[str, str]]:
        """Returns what a client is told of its own last prompt, if clients are told."""
        turn = self._open.get(id(decision)) if self._tells_clients else None
        return () if turn is None or not turn.is_examined else told(turn.verdict)

    def note_end(
        self, decision: Decision, outcome: Outcome | None, *, is_booked: bool, is_sent: bool
    ) -> None:
        """Takes what the engine reported of a request, and counts its verdict."""
        turn = self._open.pop(id(decision), None)
        if turn is None:
            return
        status = None if outcome is None else outcome.status
        turn.is_stored = is_sent and status in (None, _OK)
        turn.is_ended = True
        if outcome is not None and outcome.is_moved and turn.last is not None:
            turn.last.worker = outcome.worker
        if outcome is not None and turn.is_stored:
            self._take_report(turn, outcome)
        self._finish(turn)

    def _take_report(self, turn: _Turn, outcome: Outcome) -> None:
        """Takes what the engine of the answering worker reported."""
        verdict, cached = turn.verdict, outcome.reported.cached_tokens
        if outcome.worker:
            verdict.worker = outcome.worker
        if cached is None or not outcome.is_comparable or not outcome.is_whole:
            return
        verdict.is_reported = True
        verdict.held = held = replace(verdict.held, reused=min(cached, verdict.held.prompt))
        if cached + held.block > turn.predicted:
            return
        # it went between the decision and the engine's step, or the feed was behind
        gone, because = Cause.UNKNOWN, ""
        if turn.before is not None:
            gone, because = self._why_gone(turn.before, turn, cached)
        verdict.held, verdict.because = replace(held, gone=gone), because or verdict.because

    def _finish(self, turn: _Turn) -> None:
        """Counts a verdict once its request has ended and was examined, if it was computed."""
        if not (turn.is_ended and turn.is_examined):
            return
        if turn.last is not None and turn.last.tokens is turn.prompt.tokens:
            turn.last.is_stored = turn.is_stored
        if turn.is_stored:
            self._verdicts.append(turn.verdict)
            self.totals.count(turn.verdict)

    def collectors(self) -> Sequence[Collector]:
        """Returns what shows the figures of verdicts."""
        return (MissFigures(self.totals, self.prompts),)

    def as_json(self, request_id: str = "", conversation: int = 0) -> dict[str, Any]:
        """Returns the answer of GET /misses.

        request_id, conversation: whose verdicts are shown alone; all for "" and 0.
        """
        shown: Iterable[Verdict] = self._verdicts
        if request_id:
            shown = [one for one in shown if one.request_id == request_id]
        if conversation:
            shown = [one for one in shown if one.conversation == conversation]
        return {
            "enabled": True,
            "seconds": round(self._monotonic() - self._began_at),
            "conversations": len(self.prompts),
            "memory_bytes": self.prompts.bytes,
            **self.totals.as_json(),
            "turns": [as_json(one) for one in shown],
        }


def _said(body: bytes) -> Said:
    try:
        return parts_of(body)
    except RequestError:
        return Said()


def _end_key(decision: Decision) -> int:
    keys = decision.basis.belonging.turn.keys
    return keys[0] if keys else 0


def _tokens(overlap: Overlap | None) -> int:
    return 0 if overlap is None else overlap.certain_tokens + overlap.uncertain_tokens


def _tokens_of(decision: Decision, worker: str) -> int:
    overlaps = decision.basis.overlaps
    return _tokens(overlaps[0].get(worker)) if overlaps else 0


def _elsewhere(decision: Decision) -> int:
    """Returns how many tokens of a prompt another worker than the pick holds."""
    overlaps = decision.basis.overlaps
    others = overlaps[0].items() if overlaps else ()
    return max((_tokens(one) for name, one in others if name != decision.worker), default=0)


def _whose(request: RoutingRequest, query: Query) -> int:
    """Returns 64 bits of what a request's conversations have in common: model, adapter, tenant."""
    prompt = query.prompts[0]
    tenant = b"" if request.tenant is None else request.tenant.name
    whole = repr((query.model, prompt.lora, prompt.salt, tenant))
    return xxhash.xxh3_64_intdigest(whole.encode("utf-8", "surrogatepass"))


def _session(request: RoutingRequest, query: Query) -> str:
    session = request.head.session or query.session
    return name_apart(request.tenant, session) if session else ""


def names_of(parts: Sequence[Part], whose: int, session: str) -> Names:
    """Returns the names under which a conversation is found."""
    named = xxhash.xxh3_64_intdigest(session.encode("utf-8", "surrogatepass"), whose)
    turns = [
        one.digest ^ whose
        for one in parts
        if one.place is Place.TURN and sum(map(len, one.texts)) >= LEAST_CHARACTERS
    ]
    return Names(named if session else 0, tuple(turns[:NAMING_TURNS]))


def shown_tenant(tenant: Tenant | None) -> str:
    """Returns eight digits that stand for a tenant, those of the SHA-256 of its name; "" for none.

    What names a tenant may be a key.
    """
    return "" if tenant is None or not tenant.name else sha256(tenant.name).hexdigest()[:8]


def misses(config: Config, parts: RouterParts) -> Misses | None:
    """Returns the feature if it is enabled."""
    return Misses(config.misses, parts) if config.misses.enabled else None
