"""The messages between routers: encoding and parsing.

A message begins with an unsealed part: a magic number with the version, the fleet, and the sender.
A seal follows, a keyed hash of the rest: without the fleet's secret, nobody can forge or change a
message. The sealed part is MessagePack, an array of typed and bounded fields. A later version may
append fields, which are skipped.

Prompts are sent as fingerprints of their prefixes, workers as a keyed hash of their address.
"""

import hmac
import struct
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache
from hashlib import blake2b
from operator import lt
from typing import Annotated, NamedTuple

import msgspec
import xxhash

from extproc.media.item_report import ItemReport
from extproc.requests.outline import MOST_DIGESTS
from extproc.routing.claims.ends import End
from extproc.routing.claims.homes import Turn
from extproc.routing.claims.line import KnownPlace
from extproc.routing.claims.lines import MOST_TOLD, KnownLines, ModelPlace
from extproc.routing.claims.live_contexts import Context
from extproc.routing.claims.marks import (
    FIRST_LENGTHS,
    KEY_BYTES,
    LAST_TOKENS,
    LENGTHS,
    HasMarks,
    packed,
    unpacked,
)
from extproc.routing.load.reports import MAX_WORKERS, WorkerLoadReport
from kvstate.errors import KVSteerError
from kvstate.undecodable import UNDECODABLE

# Of the first version; a format that older routers do not understand gets another one.
MAGIC = b"KVS\x01"

# Also fits into one datagram.
MAX_BYTES = 64 * 1024

# Most entries of one message; more are sent in several messages. Merging a mark of a claim costs a
# microsecond or so.
MAX_CLAIMS = 40
MAX_MARKS = 1_024
MAX_OVER = 512
MAX_CHALLENGES = 64
MAX_ITEMS = 64
MAX_HOMES = 64
MAX_HOME_KEYS = 512

# Most keys of one entry about homes.
KEYS_OF_HOME = 64

_TAG_BYTES = 8
_SEAL_BYTES = 16
_HEAD_BYTES = len(MAGIC) + 2 * _TAG_BYTES
SEALED_FROM = _HEAD_BYTES + _SEAL_BYTES  # where the body of a message begins

# A worker's id has 63 bits: the most for which the MessagePack decoder can check bounds.
_WORKER_BITS = 2**63 - 1

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]  # of visible ASCII characters
_Tag = Annotated[bytes, msgspec.Meta(min_length=_TAG_BYTES, max_length=_TAG_BYTES)]
_Keys = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES * len(LENGTHS))]
_LENGTH_BYTES = 4
_Ends = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES * MOST_DIGESTS)]
_Lengths = Annotated[
    bytes, msgspec.Meta(min_length=_LENGTH_BYTES, max_length=_LENGTH_BYTES * MOST_DIGESTS)
]
_HomeKeys = Annotated[
    bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES * KEYS_OF_HOME)
]
_Ages = Annotated[bytes, msgspec.Meta(max_length=_LENGTH_BYTES * KEYS_OF_HOME)]
_Key = Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES)]  # of 8 bytes, or of none
_SetKey = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
_MOST_TOKENS = 2**32 - 1
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=_MOST_TOKENS)]

# The oldest home that is told, in seconds: what an age has room for.
_OLDEST_SECONDS = 2**32 - 1


class MessageError(KVSteerError):
    """A message was rejected.

    reason: wrong_size, other_version, other_secret, forged or malformed; from `OtherRouters`, also
    unproven, late, too_many_routers or out_of_order.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Keys(NamedTuple):
    """The keys derived from a fleet's secret.

    fleet: identifies the fleet. seal: seals messages, a hash that has begun with its key. marks:
    keys the fingerprints of prompts. workers: keys the addresses of workers. blocks: keys the
    blocks of the index, so that routers may exchange them.
    """

    fleet: bytes
    seal: blake2b
    marks: int
    workers: int
    blocks: int


def keys_of(secret: bytes) -> Keys:
    """Returns the keys of a fleet whose routers share a secret."""

    def derived(what: bytes, size: int) -> bytes:
        root = blake2b(secret, digest_size=32, person=b"kvsteer-sharing")
        return blake2b(what, key=root.digest(), digest_size=size).digest()

    return Keys(
        derived(b"fleet", _TAG_BYTES),
        blake2b(key=derived(b"seal", 32), digest_size=_SEAL_BYTES),
        int.from_bytes(derived(b"marks", 8), "little"),
        int.from_bytes(derived(b"workers", 8), "little"),
        int.from_bytes(derived(b"blocks", 8), "little"),
    )


def worker_id(keys: Keys, endpoint: str) -> int:
    """Returns the id in messages of the worker at an ip:port."""
    return int(xxhash.xxh3_64_intdigest(endpoint.encode(), keys.workers)) & _WORKER_BITS


class ClaimReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A prompt that the sender sent to a worker.

    number: identifies the claim when it ends. keys: those of the prompt's marks, for the shortest
    prefix first.
    """

    number: _Number
    worker: _Number
    keys: _Keys

    @property
    def mark_count(self) -> int:
        """How many marks the prompt has."""
        return len(self.keys) // KEY_BYTES


class OutlineReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A prompt without known tokens that the sender sent to a worker.

    number, worker: as in `ClaimReport`. keys: those of the prompt's marks, for the shortest prefix
    first. lengths: theirs in estimated tokens, ascending.
    """

    number: _Number
    worker: _Number
    keys: _Ends
    lengths: _Lengths

    @property
    def mark_count(self) -> int:
        """How many marks the prompt has."""
        return len(self.keys) // KEY_BYTES

    @property
    def is_sound(self) -> bool:
        """Whether all keys are whole, with a length for each, longer than the one before."""
        if len(self.keys) % KEY_BYTES or len(self.lengths) != self.mark_count * _LENGTH_BYTES:
            return False
        lengths = (0, *struct.unpack(f"<{self.mark_count}I", self.lengths))
        return lengths[-1] <= LAST_TOKENS and all(map(lt, lengths, lengths[1:]))


# A claim of either kind.
AnyClaim = ClaimReport | OutlineReport


def claim_report(number: int, worker: int, marks: HasMarks) -> AnyClaim:
    """Returns a report that a prompt with these marks was sent to a worker."""
    count = len(marks.keys) // KEY_BYTES
    if marks.lengths == FIRST_LENGTHS[min(count, len(LENGTHS))]:
        return ClaimReport(number, worker, marks.keys)
    lengths = struct.pack(f"<{count}I", *marks.lengths)
    return OutlineReport(number, worker, marks.keys, lengths)


class HomeKind(IntEnum):
    """What an entry about homes says of its keys."""

    TURN = 0  # a request of that conversation was sent to the worker
    KNOWN = 1  # the worker has been their home for some time
    OVER = 2  # their request was not computed by the worker


class HomeReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """To which worker conversations, sessions and responses belong.

    worker: as in `WorkerLoadReport`. keys: theirs, 8 bytes each. follows: of a turn, the key of the
    conversation's request before it, empty if there is none. ages: of those known, how long they
    have been, in seconds, 4 bytes each. The others are of a turn: the tokens that its conversation
    holds, its own and those that it shares, and the key of these; where its prompt ends, as the key
    of the last mark before it and the tokens up to there; of those that it shares, the ones that
    were its own before.
    """

    worker: _Number
    keys: _HomeKeys
    kind: HomeKind = HomeKind.TURN
    follows: _Key = b""
    ages: _Ages = b""
    own_tokens: _Tokens = 0
    shared_tokens: _Tokens = 0
    shared_key: _Key = b""
    end_mark: _Key = b""
    end_length: _Tokens = 0
    # Older routers neither send it nor read it.
    forked_tokens: _Tokens = 0

    @property
    def key_count(self) -> int:
        """How many keys it has."""
        return len(self.keys) // KEY_BYTES

    @property
    def is_sound(self) -> bool:
        """Whether all keys are whole, and there is an age for each that is known."""
        is_whole = not len(self.keys) % KEY_BYTES and all(
            len(one) in (0, KEY_BYTES) for one in (self.follows, self.shared_key, self.end_mark)
        )
        ages = self.key_count if self.kind is HomeKind.KNOWN else 0
        return is_whole and len(self.ages) == ages * _LENGTH_BYTES

    @property
    def each_key(self) -> tuple[int, ...]:
        """The keys."""
        return unpacked(self.keys)

    @property
    def turn(self) -> Turn:
        """The request of a conversation."""
        keys, end = self.each_key, None
        if self.end_mark:
            end = End(keys[0], _number(self.end_mark), self.end_length)
        follows, shared_key = _number(self.follows), _number(self.shared_key)
        shared, forked = self.shared_tokens, min(self.forked_tokens, self.shared_tokens)
        context = Context(self.own_tokens, shared, shared_key, follows != 0, forked)
        return Turn(keys, follows, context, end)

    @property
    def each_age(self) -> tuple[int, ...]:
        """The ages, in seconds."""
        return struct.unpack(f"<{len(self.ages) // _LENGTH_BYTES}I", self.ages)


def turn_report(worker: int, turn: Turn) -> HomeReport:
    """Returns a report that a conversation's request was sent to a worker."""
    context, end = turn.context, turn.end
    is_known = end is not None and end.length > 0
    return HomeReport(
        worker,
        packed(turn.keys[:KEYS_OF_HOME]),
        HomeKind.TURN,
        _key_bytes(turn.follows),
        own_tokens=_tokens(context.own),
        shared_tokens=_tokens(context.shared),
        shared_key=_key_bytes(context.shared_key),
        end_mark=_key_bytes(end.mark) if end is not None and is_known else b"",
        end_length=end.length if end is not None and is_known else 0,
        forked_tokens=_tokens(context.forked),
    )


def _number(key: bytes) -> int:
    """Returns a key, 0 for none."""
    return int.from_bytes(key, "little")


def _key_bytes(key: int) -> bytes:
    """Returns a key as it is sent, empty for 0."""
    return key.to_bytes(KEY_BYTES, "little") if key else b""


def _set_key(key: int) -> bytes:
    return key.to_bytes(KEY_BYTES, "little")


def _tokens(count: float) -> int:
    """Returns a number of tokens as it is sent."""
    return int(min(count, _MOST_TOKENS))


def known_report(worker: int, keys: Sequence[int], ages: Sequence[float]) -> HomeReport:
    """Returns a report that these keys have belonged to a worker for so many seconds."""
    seconds = [min(_OLDEST_SECONDS, max(0, int(age))) for age in ages]
    in_seconds = struct.pack(f"<{len(seconds)}I", *seconds)
    return HomeReport(worker, packed(keys), HomeKind.KNOWN, ages=in_seconds)


class PlaceReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A place in the sender's line of a model; see `extproc.routing.claims.line`.

    model, tenant: their keys. key: of the request. follows: of the one before it in its
    conversation, empty for none. level, turn: of its order. waited_ms: since the
    conversation came. is_away: whether nobody waits there now.
    """

    model: _SetKey
    key: _SetKey
    follows: _Key
    tokens: _Tokens
    tenant: _SetKey
    level: _Tokens
    turn: _Tokens
    waited_ms: _Tokens
    is_away: bool


class LimitReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Which share of the caches live conversations of a model may fill.

    model: its key. permille: of the caches.
    """

    model: _SetKey
    permille: _Tokens


class LinesReport(msgspec.Struct, frozen=True, array_like=True):
    """What the sender tells of those who wait; see `extproc.routing.claims.lines`."""

    limits: Annotated[tuple[LimitReport, ...], msgspec.Meta(max_length=MOST_TOLD)]
    places: Annotated[tuple[PlaceReport, ...], msgspec.Meta(max_length=MOST_TOLD)]

    @property
    def lines(self) -> KnownLines:
        """What it tells."""
        limits = {_number(one.model): one.permille / 1000 for one in self.limits}
        return KnownLines(limits, [_known_place(one) for one in self.places])


def _known_place(one: PlaceReport) -> ModelPlace:
    key, tenant, waited = _number(one.key), _number(one.tenant), one.waited_ms / 1000
    tokens, follows = one.tokens, _number(one.follows)
    known = KnownPlace(key, follows, tokens, tenant, one.level, one.turn, waited, one.is_away)
    return ModelPlace(_number(one.model), known)


def lines_report(known: KnownLines) -> LinesReport:
    """Returns the report of lines."""
    limits = list(known.limits.items())[:MOST_TOLD]
    return LinesReport(
        tuple([LimitReport(_set_key(model), _tokens(1000 * share)) for model, share in limits]),
        tuple([_place_report(one) for one in known.places]),
    )


def _place_report(one: ModelPlace) -> PlaceReport:
    key, follows, tokens, tenant, level, turn, waited, is_away = one.place
    return PlaceReport(
        _set_key(one.model),
        _set_key(key),
        _key_bytes(follows),
        _tokens(tokens),
        _set_key(tenant),
        _tokens(level),
        _tokens(turn),
        _tokens(max(0.0, 1000 * waited)),
        is_away,
    )


class Challenge(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Asks a router to prove that it runs now: to send a number back.

    tag: the router's, see `sender_tag`. number: random, and told to nobody before.
    """

    tag: _Tag
    number: _Number


class RouterReport(msgspec.Struct, frozen=True, array_like=True):
    """One message: all that a router reports of itself at a time."""

    # The sender's name.
    origin: _Name
    # The number of the sender's run: higher after every restart.
    incarnation: _Number
    # The number of this message: the sender's count from 1.
    sequence: _Number
    # When it was sent, by the sender's wall clock, in microseconds since 1970.
    sent_us: _Number
    # Whether it asks the others for all their figures and open claims.
    is_hello: bool = False
    # Whether this message completes a report of all workers to which the sender ever sent anything.
    is_whole: bool = False
    # The load on workers that changed, or on all.
    workers: Annotated[tuple[WorkerLoadReport, ...], msgspec.Meta(max_length=MAX_WORKERS)] = ()
    # The new claims, or the open ones if another router asked.
    claims: Annotated[tuple[ClaimReport, ...], msgspec.Meta(max_length=MAX_CLAIMS)] = ()
    # The numbers of claims that ended.
    ended: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=MAX_OVER)] = ()
    # The numbers of claims that were withdrawn.
    withdrawn: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=MAX_OVER)] = ()
    # Challenges to routers whose messages do not count for the sender yet.
    challenges: Annotated[tuple[Challenge, ...], msgspec.Meta(max_length=MAX_CHALLENGES)] = ()
    # The numbers of challenges to the sender.
    answers: Annotated[tuple[_Number, ...], msgspec.Meta(max_length=MAX_CHALLENGES)] = ()
    # Claims of prompts without known tokens. Older routers skip this and what follows.
    outlines: Annotated[tuple[OutlineReport, ...], msgspec.Meta(max_length=MAX_CLAIMS)] = ()
    # Where conversations belong, in the order in which it became so.
    homes: Annotated[tuple[HomeReport, ...], msgspec.Meta(max_length=MAX_HOMES)] = ()
    # What media items are.
    items: Annotated[tuple[ItemReport, ...], msgspec.Meta(max_length=MAX_ITEMS)] = ()
    # Who waits there; None if that has not changed.
    lines: LinesReport | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RouterReport)


@lru_cache(maxsize=128)  # it is the same in each message of a router
def sender_tag(origin: str, incarnation: int) -> bytes:
    """Returns the tag by which a router recognizes its own messages, which come back to it."""
    return blake2b(f"{incarnation} {origin}".encode(), digest_size=_TAG_BYTES).digest()


def encoded(report: RouterReport, keys: Keys) -> bytes:
    """Returns a message as bytes, with its seal."""
    tag = sender_tag(report.origin, report.incarnation)
    return sealed(_encoder.encode(report), keys, tag)


def sealed(body: bytes, keys: Keys, tag: bytes, magic: bytes = MAGIC) -> bytes:
    """Returns a message with this body, from the sender with this tag."""
    head = magic + keys.fleet + tag
    return head + seal_of(keys, head, body) + body


def is_from(wire: bytes, tag: bytes) -> bool:
    """Returns whether a message claims to be from the sender with this tag."""
    return wire.startswith(tag, _HEAD_BYTES - _TAG_BYTES)


def decoded(wire: bytes, keys: Keys) -> RouterReport:
    """Returns a received message; the bytes may be anything.

    Raises:
        MessageError: it is not from this fleet, or malformed.
    """
    body = unsealed(wire, keys)
    try:
        report = _decoder.decode(body)
    except UNDECODABLE:
        raise MessageError("malformed") from None
    if not _is_sound(report):
        raise MessageError("malformed")
    return report


def _is_sound(report: RouterReport) -> bool:
    """Returns whether what the decoder does not check is as it has to be.

    Plain loops: generators would take as long as all else here.
    """
    origin = report.origin
    if not origin.isascii() or not origin.isprintable() or " " in origin:
        return False
    for claim in report.claims:
        if len(claim.keys) % KEY_BYTES:
            return False
    others: tuple[OutlineReport | ItemReport | HomeReport, ...] = report.outlines
    if report.items or report.homes:
        others = (*others, *report.items, *report.homes)
    for one in others:  # noqa: SIM110 - see above
        if not one.is_sound:
            return False
    return True


def unsealed(wire: bytes, keys: Keys, magic: bytes = MAGIC) -> bytes:
    """Returns the body of a received message; the bytes may be anything.

    Raises:
        MessageError: it is not from this fleet.
    """
    if not SEALED_FROM < len(wire) <= MAX_BYTES:
        raise MessageError("wrong_size")
    if not wire.startswith(magic):
        raise MessageError("other_version")
    head, body = wire[:_HEAD_BYTES], wire[SEALED_FROM:]
    if head[len(magic) : -_TAG_BYTES] != keys.fleet:
        raise MessageError("other_secret")
    if not hmac.compare_digest(wire[_HEAD_BYTES:SEALED_FROM], seal_of(keys, head, body)):
        raise MessageError("forged")
    return body


def seal_of(keys: Keys, head: bytes, body: bytes) -> bytes:
    """Returns what proves that a message with this head and body is of a router with the keys."""
    sealed = keys.seal.copy()
    sealed.update(head)
    sealed.update(body)
    return sealed.digest()
