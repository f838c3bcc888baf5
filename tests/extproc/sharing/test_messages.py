import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.picking.load import Gauges
from extproc.picking.sent import LENGTHS, Marks
from extproc.sharing.messages import (
    MAGIC,
    MAX_BYTES,
    MAX_CLAIMS,
    MAX_OVER,
    MAX_WORKERS,
    ClaimNews,
    MessageError,
    News,
    WorkerNews,
    _seal,
    decoded,
    encoded,
    is_from,
    keys_of,
    packed,
    sender_tag,
    worker_id,
)
from tests.extproc.sharing.routers import KEYS, Router

COUNT = st.integers(0, 1_000_000)
TOKENS = st.integers(0, 2**50)
NUMBER = st.integers(0, 2**63 - 1)
NAME = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=64)
MARK_KEYS = st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=8)
NEWS = st.builds(
    News,
    *(NAME, NUMBER, NUMBER, NUMBER, st.booleans(), st.booleans()),
    st.lists(st.builds(WorkerNews, NUMBER, COUNT, *[TOKENS] * 4), max_size=3).map(tuple),
    st.lists(st.builds(ClaimNews, NUMBER, NUMBER, MARK_KEYS.map(packed)), max_size=3).map(tuple),
    *[st.lists(NUMBER, max_size=3).map(tuple)] * 2,
)

# What a router that knows the secret could write, though none of ours does.
FIELDS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)  # fmt: skip


def sealed(body: bytes) -> bytes:
    head = MAGIC + KEYS.fleet + sender_tag("a", 1)
    return head + _seal(KEYS, head, body) + body


@given(NEWS)
def test_a_message_arrives_as_it_was_sent(news: News) -> None:
    assert decoded(encoded(news, KEYS), KEYS) == news


@given(st.binary(max_size=300))
def test_bytes_of_anybody_are_refused(wire: bytes) -> None:
    with pytest.raises(MessageError):
        decoded(wire, KEYS)


@given(NEWS, st.data())
def test_a_message_that_was_changed_anywhere_is_refused(news: News, data: st.DataObject) -> None:
    wire = bytearray(encoded(news, KEYS))
    wire[data.draw(st.integers(0, len(wire) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(MessageError) as refused:
        decoded(bytes(wire), KEYS)
    assert refused.value.reason in ("other_version", "other_secret", "forged")


@given(NEWS, st.data())
def test_a_message_that_was_cut_is_refused(news: News, data: st.DataObject) -> None:
    wire = encoded(news, KEYS)
    with pytest.raises(MessageError) as refused:
        decoded(wire[: data.draw(st.integers(0, len(wire) - 1))], KEYS)
    assert refused.value.reason in ("wrong_size", "forged")


@given(FIELDS)
def test_what_one_with_the_secret_makes_up_is_taken_within_bounds_or_refused(one: object) -> None:
    router = Router("b")
    router.picture.hear(sealed(msgspec.msgpack.encode(one)), 1.0, 0)
    assert router.picture.counts.total() == 1


@given(st.binary(max_size=200))
def test_any_body_under_a_true_seal_is_taken_within_bounds_or_refused(body: bytes) -> None:
    router = Router("b")
    router.picture.hear(sealed(body), 1.0, 0)
    assert router.picture.counts.total() == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"origin": ""},
        {"origin": "a\nb"},
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
    ],
    ids=str,
)
def test_what_is_out_of_bounds_is_refused(changes: dict[str, object]) -> None:
    whole: dict[str, object] = {
        "origin": "a", "incarnation": 1, "sequence": 1, "sent_us": 0, "is_hello": False,
        "is_whole": False, "workers": [], "claims": [], "ended": [],
    }  # fmt: skip
    decoded(sealed(msgspec.msgpack.encode([*whole.values()])), KEYS)
    with pytest.raises(MessageError, match="malformed"):
        decoded(sealed(msgspec.msgpack.encode([*(whole | changes).values()])), KEYS)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(MessageError, match="malformed"):
        decoded(sealed(b"\x91" * 20_000), KEYS)


def test_the_longest_message_is_taken() -> None:
    news = News(
        "o" * 64, 2**63 - 1, 2**63 - 1, 2**63 - 1, True, True,  # noqa: FBT003 - a field of the message
        tuple(WorkerNews(2**63 - 1, 1_000_000, *[2**50] * 4) for _ in range(MAX_WORKERS)),
        tuple(ClaimNews(2**63 - 1, 1, bytes(8 * len(LENGTHS))) for _ in range(MAX_CLAIMS)),
        (2**63 - 1,) * MAX_OVER,
        (2**63 - 1,) * MAX_OVER,
    )  # fmt: skip
    wire = encoded(news, KEYS)
    assert len(wire) <= MAX_BYTES
    assert decoded(wire, KEYS) == news
    with pytest.raises(MessageError, match="wrong_size"):
        decoded(wire.ljust(MAX_BYTES + 1), KEYS)


def test_fields_that_a_later_version_appends_are_skipped() -> None:
    body = msgspec.msgpack.encode(
        ["a", 1, 1, 0, False, False, [], [], [], [], "later", {"more": 1}]
    )
    assert decoded(sealed(body), KEYS) == News("a", 1, 1, 0)


def test_another_fleet_is_told_apart_from_a_forgery() -> None:
    wire = encoded(News("a", 1, 1, 0), keys_of(b"another secret"))
    with pytest.raises(MessageError, match="other_secret"):
        decoded(wire, KEYS)
    with pytest.raises(MessageError, match="other_version"):
        decoded(b"KVS\x02" + wire[4:], KEYS)


def test_its_own_messages_are_known_without_reading_them() -> None:
    wire = encoded(News("a", 7, 1, 0), KEYS)
    assert is_from(wire, sender_tag("a", 7))
    assert not is_from(wire, sender_tag("a", 8))


def test_a_worker_takes_about_24_bytes() -> None:
    one = WorkerNews(worker_id(KEYS, "10.0.0.1:8000"), 9, 9_000, 9_000_000, 20_000, 30_000)
    empty, full = (encoded(News("a", 1, 1, 0, workers=count * (one,)), KEYS) for count in (0, 100))
    assert 20 < (len(full) - len(empty)) / 100 < 28
    assert WorkerNews.__struct_fields__[1:] == Gauges._fields


def test_marks_and_workers_are_keyed_by_the_secret() -> None:
    other = keys_of(b"another secret")
    assert worker_id(KEYS, "a:1") != worker_id(other, "a:1")
    assert len({KEYS.marks, other.marks, KEYS.workers, other.workers}) == 4
    claim = ClaimNews(1, 1, packed([3, 2**64 - 1]))
    assert claim.marks == Marks(LENGTHS[:2], (3, 2**64 - 1))
