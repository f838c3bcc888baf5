import struct
from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.routing.claims.ends import End
from extproc.routing.claims.homes import Turn
from extproc.routing.claims.line import KnownPlace
from extproc.routing.claims.lines import MOST_TOLD, KnownLines, ModelPlace
from extproc.routing.claims.live_contexts import Context
from extproc.routing.claims.marks import LAST_TOKENS, LENGTHS, Marks, packed
from extproc.routing.load.loads import Gauges
from extproc.routing.load.reports import MAX_WORKERS, WorkerLoadReport
from extproc.sharing.messages import (
    KEYS_OF_HOME,
    MAGIC,
    MAX_BYTES,
    MAX_CHALLENGES,
    MAX_CLAIMS,
    MAX_HOME_KEYS,
    MAX_HOMES,
    MAX_MARKS,
    MAX_OVER,
    Challenge,
    ClaimReport,
    HomeKind,
    HomeReport,
    MessageError,
    OutlineReport,
    RouterReport,
    claim_report,
    decoded,
    encoded,
    is_from,
    keys_of,
    known_report,
    lines_report,
    seal_of,
    sender_tag,
    turn_report,
    worker_id,
)
from tests.extproc.sharing.routers import KEYS, Router

COUNT = st.integers(0, 1_000_000)
TOKENS = st.integers(0, 2**50)
NUMBER = st.integers(0, 2**63 - 1)
NAME = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=64)
TAG = st.binary(min_size=8, max_size=8)
MARK_KEYS = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=8)
OUTLINES = st.dictionaries(st.integers(1, 63), st.integers(0, 2**64 - 1), min_size=1).map(
    lambda marks: Marks(tuple(sorted(marks)), packed(tuple(marks.values())))
)
KEY = st.integers(0, 2**64 - 1)
KNOWN = st.dictionaries(KEY, st.integers(0, 2**40), min_size=1, max_size=KEYS_OF_HOME)
TURNS = st.builds(
    Turn,
    keys=st.lists(KEY, min_size=1, max_size=3).map(tuple),
    follows=KEY,
    context=st.builds(
        Context,
        st.integers(0, 2**33),
        st.integers(0, 2**33),
        KEY,
        forked=st.integers(0, 2**33),
    ),
    end=st.none() | st.builds(End, KEY, KEY, st.integers(1, 2**20)),
)
LONGEST_TURN = Turn(
    (1,) * (MAX_HOME_KEYS // MAX_HOMES),
    2**64 - 1,
    Context(2.0**33, 2.0**33, 2**64 - 1, forked=2.0**33),
    End(1, 2**64 - 1, LAST_TOKENS),
)
PLACE = KnownPlace(2**64 - 1, 2**64 - 1, 1e300, 2**64 - 1, 2**40, 2**40, 1e300, is_away=False)
LONGEST_LINES = KnownLines(
    dict.fromkeys(range(MOST_TOLD), inf), [ModelPlace(2**64 - 1, PLACE)] * MOST_TOLD
)
ANY_COUNT = st.integers(0, 2**70)
LINES = st.builds(
    KnownLines,
    st.dictionaries(KEY, st.floats(0.0, inf, allow_nan=False), max_size=MOST_TOLD + 2),
    st.lists(
        st.builds(
            ModelPlace,
            KEY,
            st.builds(
                KnownPlace,
                key=KEY,
                follows=KEY,
                tokens=st.floats(0.0, inf, allow_nan=False),
                tenant=KEY,
                level=ANY_COUNT,
                turn=ANY_COUNT,
                waited_seconds=st.floats(allow_nan=False),
                is_away=st.booleans(),
            ),
        ),
        max_size=3,
    ),
)
HOMES = (
    st.builds(turn_report, NUMBER, TURNS)
    | st.builds(
        lambda worker, known: known_report(worker, list(known), list(known.values())), NUMBER, KNOWN
    )
    | st.builds(HomeReport, NUMBER, MARK_KEYS.map(packed), st.just(HomeKind.OVER))
)
NEWS = st.builds(
    RouterReport,
    NAME,
    NUMBER,
    NUMBER,
    NUMBER,
    st.booleans(),
    st.booleans(),
    st.lists(st.builds(WorkerLoadReport, NUMBER, COUNT, *[TOKENS] * 4), max_size=3).map(tuple),
    st.lists(st.builds(ClaimReport, NUMBER, NUMBER, MARK_KEYS.map(packed)), max_size=3).map(tuple),
    *[st.lists(NUMBER, max_size=3).map(tuple)] * 2,
    st.lists(st.builds(Challenge, TAG, NUMBER), max_size=3).map(tuple),
    st.lists(NUMBER, max_size=3).map(tuple),
    st.lists(st.builds(claim_report, NUMBER, NUMBER, OUTLINES), max_size=3).map(tuple),
    st.lists(HOMES, max_size=3).map(tuple),
)


@given(LINES)
def test_whatever_is_known_of_lines_can_be_told(known: KnownLines) -> None:
    news = RouterReport("a", 1, 1, 0, lines=lines_report(known))
    told = decoded(encoded(news, KEYS), KEYS).lines
    assert told == news.lines
    assert told is not None
    assert [(one.model, one.place.key) for one in told.lines.places] == [
        (one.model, one.place.key) for one in known.places
    ]


# What a router that knows the secret could write, though none of ours does.
FIELDS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)  # fmt: skip


def sealed(body: bytes) -> bytes:
    head = MAGIC + KEYS.fleet + sender_tag("a", 1)
    return head + seal_of(KEYS, head, body) + body


@given(NEWS)
def test_decoded_inverts_encoded(news: RouterReport) -> None:
    assert decoded(encoded(news, KEYS), KEYS) == news


@given(st.binary(max_size=300))
def test_decoded_refuses_any_unsealed_bytes(wire: bytes) -> None:
    with pytest.raises(MessageError):
        decoded(wire, KEYS)


@given(NEWS, st.data())
def test_decoded_refuses_a_message_changed_anywhere(
    news: RouterReport, data: st.DataObject
) -> None:
    wire = bytearray(encoded(news, KEYS))
    wire[data.draw(st.integers(0, len(wire) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(MessageError) as refused:
        decoded(bytes(wire), KEYS)
    assert refused.value.reason in ("other_version", "other_secret", "forged")


@given(NEWS, st.data())
def test_decoded_refuses_a_truncated_message(news: RouterReport, data: st.DataObject) -> None:
    wire = encoded(news, KEYS)
    with pytest.raises(MessageError) as refused:
        decoded(wire[: data.draw(st.integers(0, len(wire) - 1))], KEYS)
    assert refused.value.reason in ("wrong_size", "forged")


@given(FIELDS)
def test_hear_accepts_any_sealed_news_within_bounds_or_refuses_it(one: object) -> None:
    router = Router("b")
    router.others.hear(sealed(msgspec.msgpack.encode(one)), 1.0, 0)
    assert router.others.counts.total() == 1


@given(st.binary(max_size=200))
def test_hear_accepts_any_sealed_body_within_bounds_or_refuses_it(body: bytes) -> None:
    router = Router("b")
    router.others.hear(sealed(body), 1.0, 0)
    assert router.others.counts.total() == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"origin": ""},
        {"origin": "a\nb"},
        {"origin": "a b"},
        {"origin": "\x7f"},
        {"origin": "é"},
        {"origin": "x" * 65},
        {"sequence": -1},
        {"workers": [[1, -1, 0, 0, 0, 0]]},
        {"workers": [[1, 1_000_001, 0, 0, 0, 0]]},
        {"workers": [[1, 0, 2**51, 0, 0, 0]]},
        {"workers": [[1, 0, 0.5, 0, 0, 0]]},
        {"workers": [[1, 0, 0, 0, 0, 0]] * (MAX_WORKERS + 1)},
        {"claims": [[1, 1, bytes(7)]]},
        {"claims": [[1, 1, bytes(12)]]},
        {"claims": [[1, 1, bytes(8 * len(LENGTHS) + 8)]]},
        {"claims": [[1, 1, bytes(8)]] * (MAX_CLAIMS + 1)},
        {"ended": [0] * (MAX_OVER + 1)},
        {"challenges": [[bytes(7), 0]]},
        {"challenges": [[bytes(8), 0]] * (MAX_CHALLENGES + 1)},
        {"answers": [-1]},
        {"outlines": [[1, 1, bytes(12), bytes(6)]]},
        {"outlines": [[1, 1, bytes(16), bytes(4)]]},
        {"homes": [[1, bytes(7)]]},
        {"homes": [[1, b""]]},
        {"homes": [[1, bytes(8 * KEYS_OF_HOME + 8)]]},
        {"homes": [[1, bytes(8)]] * (MAX_HOMES + 1)},
        {"homes": [[1, bytes(8), 3]]},
        {"homes": [[1, bytes(8), 0, bytes(7)]]},
        {"homes": [[1, bytes(8), 0, b"", bytes(4)]]},
        {"homes": [[1, bytes(16), 1, b"", bytes(4)]]},
        {"lines": [[[bytes(8), 1]] * (MOST_TOLD + 1), []]},
        {"lines": [[[bytes(7), 1]], []]},
        {"lines": [[[bytes(8), 2**32]], []]},
        {"lines": [[], [[bytes(8), bytes(8), b"", 1, bytes(8), 0, 1, 0, False]] * (MOST_TOLD + 1)]},
        {"lines": [[], [[bytes(8), bytes(8), b"", 1, bytes(8), 0, 1, 2**32, False]]]},
        {"lines": [[], [[bytes(8), bytes(8), b"", 1, bytes(8), 0, -1, 0, False]]]},
        {"lines": [[], [[bytes(8), bytes(8), b"", 1.5, bytes(8), 0, 1, 0, False]]]},
    ],
    ids=str,
)
def test_decoded_refuses_values_out_of_bounds(changes: dict[str, object]) -> None:
    whole: dict[str, object] = {
        "origin": "a", "incarnation": 1, "sequence": 1, "sent_us": 0, "is_hello": False,
        "is_whole": False, "workers": [], "claims": [], "ended": [],
        "withdrawn": [], "challenges": [], "answers": [], "outlines": [], "homes": [],
        "items": [], "lines": None,
    }  # fmt: skip
    decoded(sealed(msgspec.msgpack.encode([*whole.values()])), KEYS)
    with pytest.raises(MessageError, match="malformed"):
        decoded(sealed(msgspec.msgpack.encode([*(whole | changes).values()])), KEYS)


def test_decoded_refuses_deep_nesting() -> None:
    with pytest.raises(MessageError, match="malformed"):
        decoded(sealed(b"\x91" * 20_000), KEYS)


def test_decoded_accepts_the_longest_message() -> None:
    news = RouterReport(
        "o" * 64, 2**63 - 1, 2**63 - 1, 2**63 - 1, True, True,
        (WorkerLoadReport(2**63 - 1, 1_000_000, *[2**50] * 4),) * MAX_WORKERS,
        tuple(ClaimReport(2**63 - 1, 1, bytes(8 * len(LENGTHS))) for _ in range(MAX_CLAIMS)),
        (2**63 - 1,) * MAX_OVER,
        (2**63 - 1,) * MAX_OVER,
        (Challenge(bytes(8), 2**63 - 1),) * MAX_CHALLENGES,
        (2**63 - 1,) * MAX_CHALLENGES,
        homes=(turn_report(2**63 - 1, LONGEST_TURN),) * MAX_HOMES,
    )  # fmt: skip
    some = news.claims[: MAX_MARKS // len(LENGTHS)]  # as many as a router tells beside lines
    for longest in (news, replace(news, claims=some, lines=lines_report(LONGEST_LINES))):
        wire = encoded(longest, KEYS)
        assert len(wire) <= MAX_BYTES
        assert decoded(wire, KEYS) == longest
    with pytest.raises(MessageError, match="wrong_size"):
        decoded(wire.ljust(MAX_BYTES + 1), KEYS)


def test_decoded_skips_fields_of_a_later_version() -> None:
    body = msgspec.msgpack.encode(
        ["a", 1, 1, 0, False, False, *[[]] * 9, None, "later", {"more": 1}]
    )
    assert decoded(sealed(body), KEYS) == RouterReport("a", 1, 1, 0)


def test_decoded_distinguishes_another_secret_from_another_version() -> None:
    wire = encoded(RouterReport("a", 1, 1, 0), keys_of(b"another secret"))
    with pytest.raises(MessageError, match="other_secret"):
        decoded(wire, KEYS)
    with pytest.raises(MessageError, match="other_version"):
        decoded(b"KVS\x02" + wire[4:], KEYS)


def test_is_from_matches_own_messages_unread() -> None:
    wire = encoded(RouterReport("a", 7, 1, 0), KEYS)
    assert is_from(wire, sender_tag("a", 7))
    assert not is_from(wire, sender_tag("a", 8))


def test_encoded_worker_has_about_24_bytes() -> None:
    one = WorkerLoadReport(worker_id(KEYS, "10.0.0.1:8000"), 9, 9_000, 9_000_000, 20_000, 30_000)
    empty, full = (
        encoded(RouterReport("a", 1, 1, 0, workers=(one,) * count), KEYS) for count in (0, 100)
    )
    assert 20 < (len(full) - len(empty)) / 100 < 28
    assert WorkerLoadReport.__struct_fields__[1:] == Gauges._fields


def test_marks_and_worker_ids_are_keyed_by_the_secret() -> None:
    other = keys_of(b"another secret")
    assert worker_id(KEYS, "a:1") != worker_id(other, "a:1")
    assert len({KEYS.marks, other.marks, KEYS.workers, other.workers}) == 4


def test_claim_of_known_tokens_leaves_its_lengths_out() -> None:
    keys = packed([3, 2**64 - 1])
    assert claim_report(1, 2, Marks(LENGTHS[:2], keys)) == ClaimReport(1, 2, keys)


@given(OUTLINES)
def test_outline_is_the_same_after_a_message(marks: Marks) -> None:
    reports = claim_report(1, 2, marks)
    assert isinstance(reports, OutlineReport)
    assert (reports.keys, struct.unpack(f"<{reports.mark_count}I", reports.lengths)) == (
        marks.keys,
        marks.lengths,
    )
    assert decoded(
        encoded(RouterReport("a", 1, 1, 0, outlines=(reports,)), KEYS), KEYS
    ).outlines == (reports,)


@pytest.mark.parametrize(
    "lengths", [b"\1\0\0\0", b"\1\0\0\0" * 2, b"\2\0\0\0\1\0\0\0", b"\xff" * 8]
)
def test_outline_without_ascending_lengths_is_malformed(lengths: bytes) -> None:
    reports = OutlineReport(1, 2, packed((1, 2)), lengths)
    with pytest.raises(MessageError, match="malformed"):
        decoded(encoded(RouterReport("a", 1, 1, 0, outlines=(reports,)), KEYS), KEYS)
