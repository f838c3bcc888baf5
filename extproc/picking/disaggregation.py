"""Splits requests: decides which worker computes a prompt for another, and informs both and Envoy.

A request has one leg, on a worker that takes all of it, or two: a prefill worker computes the
prompt and hands its KV blocks over, and a decode worker generates. The answering worker is decided
first, by its own cost. A second leg is used if computing the prompt there costs more than apart:

    here  = uncached prompt tokens x affinity + prompt tokens still queued there
            + uncached prompt tokens x requests that it is answering x interference
    apart = cost of the cheapest prefill worker, by overlap and load like any other worker's
            + tokens to be transferred, at the speed of a transfer

All in tokens of prefill work. A worker of role both takes only whole requests: whether its engine
could take half of one is not known.

The proxy or a sidecar learns of the split from headers. If both requests are sent at once, the
engines learn of it from the body: fields are added at the end of the JSON object, and all other
bytes stay. A client's own fields with these names are removed from every body: with them, a worker
would fetch KV blocks from, or hand them to, any host that the client names. Sources: SGLang's
`disaggregation/utils.py` and its gateway (bootstrap_*, lists for several prompts), vLLM 0.32's
`v1/kv_offload/tiering/p2p/manager.py` and `mooncake_connector.py` (kv_transfer_params).
"""

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import msgspec

from extproc import address, headers
from extproc.config.schema import Config
from extproc.config.sections import (
    BOTH,
    DECODE,
    MIRROR,
    MOONCAKE,
    PREFILL,
    SGLANG,
    Disaggregation,
)
from extproc.endpoint_files import cluster_names, prefill_cluster
from extproc.picking.decision import (
    Decision,
    Query,
    Refusal,
    Snapshot,
    Source,
    Split,
    decide,
    refused_body,
)
from extproc.picking.eligibility import Candidate, why_excluded
from extproc.picking.load import Load
from extproc.picking.policies import Chance
from kvstate.overlap import Overlap

Value = TypeVar("Value")

COMPUTES_FOR_OTHERS = "computes prompts for other workers only"

# Why another worker computes a prompt, or does not: as counted, and in words.
APART, NEEDED = "apart", "needed"
NO_PROMPT, NOT_SET, BODY = "no_prompt", "not_set", "body"
ANSWERS, PROMPTS, NO_WORKER = "several_answers", "several_prompts", "no_prefill_worker"
WHOLE, FEW, HERE = "whole", "few_tokens", "here"
WORDS = {
    APART: "computing the prompt elsewhere costs less",
    NEEDED: "the decode worker cannot compute a prompt itself",
    NO_PROMPT: "there is no prompt to compute",
    NOT_SET: "disaggregation.mode is not set",
    BODY: "its body cannot say where the prompt is computed",
    ANSWERS: "it asks for several answers",
    PROMPTS: "it has several prompts",
    NO_WORKER: "no prefill worker can take the prompt",
    WHOLE: "the cheapest worker takes whole requests",
    FEW: "too few tokens need to be computed",
    HERE: "computing the prompt elsewhere costs no less",
}


def decide_legs(
    query: Query, snapshot: Snapshot, rules: Disaggregation, now: float, rng: Chance
) -> Decision:
    """Decides where a query goes if some workers take only a part of a request.

    now: seconds of the loads' clock.
    """
    workers = snapshot.workers
    computes = bool(query.prompts or query.text or query.unread_bytes)
    helpers = [
        worker
        for worker in workers
        if worker.role == PREFILL
        and worker.endpoint not in snapshot.ejected
        and not why_excluded(worker, query.demand, snapshot.unfit)
    ]
    helpers = [one for one in helpers if one.endpoint not in snapshot.doubted] or helpers
    whole = _why_whole(query, rules, helpers) if computes else NO_PROMPT
    # SGLang's decode workers cannot compute a prompt
    needs_helper = computes and rules.connector == SGLANG
    closed = {PREFILL: COMPUTES_FOR_OTHERS}
    if needs_helper and whole:
        closed[DECODE] = f"cannot compute a prompt itself: {WORDS[whole]}"
    answering = msgspec.structs.replace(
        snapshot, workers=[_closed(worker, closed) for worker in workers], roster=None
    )
    answer = decide(query, answering, now, rng)
    if not answer.pick:
        return answer
    roles = {worker.endpoint: worker.role for worker in workers}
    if not whole and roles[answer.pick[0]] == BOTH:
        whole = WHOLE
    if whole:
        split = _whole(whole)
    else:
        among = msgspec.structs.replace(
            snapshot,
            workers=helpers,
            roster=None,
            ranks=None,
            rules=replace(snapshot.rules, shed=False),
        )
        split = _split(query, among, answer, rules, (now, rng), must=needs_helper)
    pick = answer.pick
    if split.prefill is not None or needs_helper:  # a retry must fit the request as it is sent
        fitting = DECODE if split.prefill is not None else BOTH
        pick = tuple([endpoint for endpoint in pick if roles[endpoint] == fitting])
    return msgspec.structs.replace(answer, pick=pick, split=split)


def _why_whole(query: Query, rules: Disaggregation, helpers: Sequence[Candidate]) -> str:
    """Returns why the request cannot have two legs, whatever they cost; "" if it can."""
    if rules.mode is None:
        return NOT_SET
    if not query.may_split:
        return BODY
    if query.answers > 1:
        return ANSWERS
    if len(query.prompts) > 1 and not (rules.mode == MIRROR and rules.connector == SGLANG):
        return PROMPTS
    return "" if helpers else NO_WORKER


def _whole(outcome: str) -> Split:
    return Split(None, WORDS[outcome], outcome=outcome)


def _closed(worker: Candidate, closed: dict[str, str]) -> Candidate:
    why = closed.get(worker.role, "")
    if not why or worker.excluded:
        return worker
    return msgspec.structs.replace(worker, excluded=why)


def _split(
    query: Query,
    among: Snapshot,
    answer: Decision,
    rules: Disaggregation,
    around: tuple[float, Chance],
    *,
    must: bool,
) -> Split:
    """Compares the costs with and without a second leg; must: the first worker requires one."""
    uncached = answer.uncached_tokens
    if not must and uncached < rules.min_uncached_tokens:
        few = f"{uncached:.0f} uncached tokens are fewer than {rules.min_uncached_tokens}"
        return Split(None, few, outcome=FEW)
    prefill = decide(query, among, *around)
    load = _of_pick(answer, answer.loads) or Load()
    others = load.in_flight + load.others
    weight = answer.affinity + rules.interference_percent / 100 * others
    here = (load.backlog_tokens + weight * uncached) * load.slowness
    rate = among.rules.cost.prefill_tokens_per_second
    transfer = uncached * rate / rules.transfer_tokens_per_second
    apart = (_of_pick(prefill, prefill.costs) or 0.0) + transfer
    outcome = NEEDED if must else APART if here > apart else HERE
    return Split(None if outcome == HERE else prefill, WORDS[outcome], here, apart, outcome)


def _of_pick(decision: Decision, column: Sequence[Value]) -> Value:
    """Returns the entry of the first pick in a column of all workers."""
    places = [worker.name for worker in decision.workers]
    return column[places.index(decision.worker)]


def with_source(query: Query, decision: Decision, least: int, ejected: Collection[str]) -> Decision:
    """Adds the worker that holds most of the prompt as a source, if it holds enough more.

    least: how many more tokens than the pick it must hold. ejected: failing endpoints. Both workers
    need a port for handing KV blocks over. A retry does not go to the source: no worker can pull
    from itself.
    """
    is_whole = decision.prefill is None and query.may_split and query.reads_cache
    if not (decision.pick and is_whole and query.sole is not None):
        return decision
    held = decision.held[0]
    own = _certain(held, decision.worker)
    ports = {worker.name: worker.transfer_port for worker in decision.workers}
    able = [
        Source(worker.endpoint, worker.transfer_port, _certain(held, worker.name) - own)
        for worker, why in zip(decision.workers, decision.excluded, strict=True)
        if worker.transfer_port is not None and not why and worker.endpoint not in ejected
    ]
    source = max(able, key=lambda one: one.tokens, default=None)
    if source is None or source.tokens < least or ports[decision.worker] is None:
        return decision
    return msgspec.structs.replace(
        decision,
        source=source,
        pick=tuple([endpoint for endpoint in decision.pick if endpoint != source.endpoint]),
        uncached_tokens=max(0.0, decision.uncached_tokens - source.tokens),
    )


def _certain(held: Mapping[str, Overlap], name: str) -> int:
    return held[name].certain_tokens if name in held else 0


# A longer body is not changed: the request then has one worker.
MAX_EDITED_BYTES = 4 * 1024 * 1024

# The paths on which engines read these fields.
PATHS = ("/v1/chat/completions", "/v1/completions")
SGLANG_PATHS = (*PATHS, "/generate")

_NAMES = (
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
    *("decode_tp_size", "kv_transfer_params"),
)
_SPACE = b" \t\r\n"

# Added for a prefill worker, so that it generates one token; the later of two equal names counts.
_ONE_TOKEN = {
    "max_tokens": 1,
    "min_tokens": 0,
    "stream": False,
    "stream_options": None,
}
_CHAT = {"max_completion_tokens": 1}


class _Own(msgspec.Struct, frozen=True):
    """A client's own fields with these names."""

    bootstrap_host: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    bootstrap_port: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    bootstrap_room: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    bootstrap_pair_key: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    decode_tp_size: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    kv_transfer_params: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_NO_FIELDS = _Own()


class Transfer(NamedTuple):
    """The fields added to both bodies; prefill is empty if both workers get the same body."""

    decode: bytes
    prefill: bytes = b""


class Edited(NamedTuple):
    """A body, and its end for the prefill worker: how many bytes to cut, and what replaces them."""

    body: bytes
    tail: str = ""


def may_split(connector: str, path: str, body: bytes | None) -> bool:
    """Returns whether a request can carry these fields. body: None if it must not be changed."""
    paths = SGLANG_PATHS if connector == SGLANG else PATHS
    return body is not None and path in paths and len(body) <= MAX_EDITED_BYTES


def transfer(
    connector: str, prefiller: str, port: int, path: str, rooms: Sequence[int]
) -> Transfer:
    """Returns the fields for both bodies.

    prefiller: ip:port of the worker that computes the prompt; port: its port for handing over.
    rooms: a random number of 63 bits for each prompt.
    """
    host = address.parse(prefiller).host
    if connector == SGLANG:
        many = len(rooms) > 1
        fields: dict[str, object] = {
            "bootstrap_host": [host] * len(rooms) if many else host,
            "bootstrap_port": [port] * len(rooms) if many else port,
            "bootstrap_room": list(rooms) if many else rooms[0],
        }
        return Transfer(_members(fields))
    number = f"{rooms[0]:016x}"
    here: dict[str, object]
    there: dict[str, object]
    if connector == MOONCAKE:
        place = f"http://{address.Address(host, port)}"
        here = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": number}
        here |= {"remote_bootstrap_addr": place, "remote_engine_id": prefiller}
        there = {"do_remote_prefill": False, "do_remote_decode": True, "transfer_id": number}
    else:
        place_of = {"remote_host": host, "remote_port": port}
        here = {"remote_prefiller": {"kv_request_id": number, **place_of}}
        there = {"remote_decoder": {"kv_request_id": number}}
    one = _ONE_TOKEN | (_CHAT if path == PATHS[0] else {})
    return Transfer(
        _members({"kv_transfer_params": here}), _members({"kv_transfer_params": there, **one})
    )


def pulled(source: str, port: int, number: int) -> Transfer:
    """Returns the field that makes a worker pull a part of the prompt from another one.

    source: ip:port of the other worker; port: its port for handing over. number: random, 63 bits.
    """
    place = {"remote_host": address.parse(source).host, "remote_port": port}
    return Transfer(
        _members(
            {
                "kv_transfer_params": {
                    "remote_kv_source": {"kv_request_id": f"{number:016x}", **place}
                }
            }
        )
    )


def _members(fields: dict[str, object]) -> bytes:
    return msgspec.json.encode(fields)[1:-1]


def edited(body: bytes, fields: Transfer | None) -> Edited | None:
    """Returns a body with these fields instead of the client's own; None if it is not an object."""
    try:
        own = msgspec.json.decode(body, type=_Own)
        if own != _NO_FIELDS:
            members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            kept = {name: raw for name, raw in members.items() if name not in _NAMES}
            body = msgspec.json.encode(kept)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if fields is None:
        return Edited(body)
    head = body.rstrip(_SPACE)[:-1]  # without its closing brace
    comma = b"" if head.rstrip(_SPACE) == b"{" else b","
    end = b"%b%b}" % (comma, fields.decode)
    tail = ""
    if fields.prefill:
        tail = f"{len(end)}:{(comma + fields.prefill).decode()}}}"
    return Edited(head + end, tail)


def may_hide(body: bytes) -> bool:
    """Returns whether an engine may find such fields in a body that KVSteer cannot parse.

    Python's json accepts more than JSON: NaN, and other encodings.
    """
    plain = body.replace(b"\0", b"")
    return b"\\u" in plain or any(name.encode() in plain for name in _NAMES)


# Size of a room: SGLang accepts positive numbers of 64 bits.
ROOM_BITS = 63

# The headers to set, and the body that replaces the client's, None if it stays.
Said = tuple[tuple[tuple[str, str], ...], bytes | None]
_NOTHING_SAID: Said = ((), None)


class Legs:
    """Writes the headers and bodies that announce the legs of a router's requests.

    headers: the headers that no client may set. bits: returns an unpredictable number of this many
    random bits.
    """

    def __init__(self, config: Config, bits: Callable[[int], int] = secrets.randbits) -> None:
        self._rules = config.disaggregation
        self._changes_bodies = self._rules.changes_bodies
        self.headers: tuple[str, ...] = headers.OF_LEGS.get(self._rules.mode or "", ())
        clusters = cluster_names(model.name for model in config.models)
        self._clusters = {model: prefill_cluster(name) for model, name in clusters.items()}
        self._bits = bits

    def of(self, decision: Decision, path: str, body: bytes | None) -> Said | Refusal:
        """Returns the headers and the body to send, or the answer that refuses the request.

        body: None if it must not be changed.
        """
        if not self._changes_bodies:
            return self._to_sidecar(decision), None
        if body is None:
            return _NOTHING_SAID
        changed = edited(body, self._transfer(decision, path))
        if changed is None:
            is_harmless = decision.prefill is None and not may_hide(body)
            return _NOTHING_SAID if is_harmless else refused_body()
        replaced = None if changed.body is body else changed.body
        return self._headers(decision, changed.tail), replaced

    def _to_sidecar(self, decision: Decision) -> tuple[tuple[str, str], ...]:
        prefill, source = decision.prefill, decision.source
        if prefill is not None:
            return ((headers.PREFILLER, prefill.pick[0]),)
        return () if source is None else ((headers.KV_SOURCE, source.endpoint),)

    def _transfer(self, decision: Decision, path: str) -> Transfer | None:
        prefill, source = decision.prefill, decision.source
        if source is not None:
            return pulled(source.endpoint, source.port, self._bits(ROOM_BITS))
        if prefill is None:
            return None
        names = [worker.name for worker in prefill.workers]
        port = prefill.workers[names.index(prefill.worker)].transfer_port
        rooms = [self._bits(ROOM_BITS) for _ in range(max(1, len(prefill.marks)))]
        return transfer(
            *(self._rules.connector, prefill.pick[0], port or self._rules.transfer_port),
            *(path, rooms),
        )

    def _headers(self, decision: Decision, tail: str) -> tuple[tuple[str, str], ...]:
        prefill = decision.prefill
        if prefill is None or decision.model is None:
            return ()
        said = (
            (headers.PREFILLER, prefill.pick[0]),
            (headers.PREFILL_CLUSTER, self._clusters[decision.model]),
        )
        return (*said, (headers.PREFILL_TAIL, tail)) if tail else said
