import gc
import tracemalloc
from array import array

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.picking.sent import BYTES_PER_MARK, Holdings, Lifetimes, Sent, marks_of
from kvstate.overlap import Prompt

LIFETIMES = Lifetimes(speculative=10.0, grace=1.0, approximate=100.0)
PROMPT = Prompt("m", array("I", range(300)))
LONGER = Prompt("m", array("I", range(500)))
OTHER = Prompt("m", array("I", range(7, 307)))


def table(limit_bytes: int = 1 << 20) -> Sent:
    return Sent(1, limit_bytes, LIFETIMES)


def test_nothing_is_expected_where_nothing_was_sent() -> None:
    sent = table()
    assert sent.expected(sent.marks(PROMPT), 0.0) == {}


def test_what_was_sent_is_expected_there_and_nowhere_else() -> None:
    a = Holdings("a")
    sent = table()
    sent.record(a, sent.marks(PROMPT), 0.0)
    assert sent.expected(sent.marks(PROMPT), 0.0) == {"a": (256, 256)}
    assert sent.expected(sent.marks(LONGER), 0.0) == {"a": (256, 256)}
    assert sent.expected(sent.marks(OTHER), 0.0) == {}


def test_each_worker_is_expected_to_hold_its_own_share() -> None:
    a, b = Holdings("a"), Holdings("b")
    sent = table()
    sent.record(a, sent.marks(PROMPT), 0.0)
    sent.record(b, sent.marks(LONGER), 0.0)
    expected = sent.expected(sent.marks(LONGER), 0.0)
    assert expected == {"a": (256, 256), "b": (448, 448)}


def test_namespaces_are_apart() -> None:
    a = Holdings("a")
    sent = table()
    sent.record(a, sent.marks(PROMPT), 0.0)
    for other in (replace(PROMPT, lora="x"), replace(PROMPT, salt="x"), replace(PROMPT, model="n")):
        assert sent.expected(sent.marks(other), 0.0) == {}


def test_text_is_apart_from_tokens_and_from_other_models() -> None:
    a = Holdings("a")
    sent = table()
    text = b"word " * 100
    sent.record(a, sent.text_marks("m", text), 0.0)
    assert sent.expected(sent.text_marks("m", text + b"more"), 0.0) == {"a": (64, 64)}
    assert sent.expected(sent.text_marks("n", text), 0.0) == {}
    assert sent.expected(sent.text_marks("m", text, lora="x"), 0.0) == {}
    assert sent.expected(sent.text_marks("m", text, salt="x"), 0.0) == {}


def test_a_running_request_is_expected_until_its_deadline() -> None:
    a = Holdings("a")
    sent = table()
    sent.record(a, sent.marks(PROMPT), 0.0)
    assert sent.expected(sent.marks(PROMPT), 9.9) == {"a": (256, 256)}
    assert sent.expected(sent.marks(PROMPT), 10.0) == {"a": (0, 256)}


def test_after_its_end_a_request_is_expected_until_its_events_are_there() -> None:
    a = Holdings("a")
    sent = table()
    claim = sent.record(a, sent.marks(PROMPT), 0.0)
    sent.end(claim, 2.0)
    sent.end(claim, 5.0)
    assert sent.expected(sent.marks(PROMPT), 2.9) == {"a": (256, 256)}
    assert sent.expected(sent.marks(PROMPT), 3.0) == {"a": (0, 256)}


def test_what_was_sent_long_ago_is_not_expected() -> None:
    a = Holdings("a")
    sent = table()
    sent.record(a, sent.marks(PROMPT), 0.0)
    assert sent.expected(sent.marks(PROMPT), 100.0) == {}


def test_a_later_request_renews_the_claim() -> None:
    a, b = Holdings("a"), Holdings("b")
    sent = table()
    sent.end(sent.record(a, sent.marks(PROMPT), 0.0), 1.0)
    sent.record(b, sent.marks(PROMPT), 60.0)
    sent.record(a, sent.marks(PROMPT), 60.0)
    expected = sent.expected(sent.marks(PROMPT), 61.0)
    assert expected == {"a": (256, 256), "b": (256, 256)}


def test_a_request_that_never_arrived_claims_nothing() -> None:
    a = Holdings("a")
    sent = table()
    sent.withdraw(sent.record(a, sent.marks(PROMPT), 0.0))
    assert sent.expected(sent.marks(PROMPT), 0.0) == {}


def test_a_worker_that_lost_everything_is_expected_to_hold_only_what_came_later() -> None:
    a, b = Holdings("a"), Holdings("b")
    sent = table()
    sent.record(a, sent.marks(PROMPT), 0.0)
    sent.record(b, sent.marks(PROMPT), 0.0)
    a.lose(1.0)
    assert set(sent.expected(sent.marks(PROMPT), 2.0)) == {"b"}
    sent.record(a, sent.marks(PROMPT), 2.0)
    assert set(sent.expected(sent.marks(PROMPT), 2.0)) == {"a", "b"}


def test_a_worker_that_is_gone_holds_nothing_nor_does_another_one_of_its_name() -> None:
    sent, gone, other = table(), Holdings("a"), Holdings("a")
    sent.record(gone, sent.marks(PROMPT), 0.0)
    gone.lose()
    assert sent.expected(sent.marks(PROMPT), 2.0) == {}
    sent.record(other, sent.marks(PROMPT), 2.0)
    sent.record(gone, sent.marks(LONGER), 2.0)
    assert sent.expected(sent.marks(LONGER), 2.0) == {"a": (256, 256)}


def test_the_oldest_half_gives_way_when_the_table_is_full() -> None:
    a = Holdings("a")
    sent = table(2 * 16 * BYTES_PER_MARK)
    for number in range(50):
        prompt = Prompt("m", array("I", range(number, number + 300)))
        sent.record(a, sent.marks(prompt), float(number) / 100)
        assert set(sent.expected(sent.marks(prompt), 0.5)) == {"a"}
        assert len(sent) <= 2 * (16 + 4)
    assert sent.expected(sent.marks(Prompt("m", array("I", range(300)))), 0.5) == {}


def test_a_mark_takes_no_more_memory_than_it_is_counted_for() -> None:
    a = Holdings("a")
    sent = table(1 << 30)
    gc.collect()
    tracemalloc.start()
    for number in range(500):
        marks = marks_of(number, array("I", bytes(4 * 8000)))
        sent.record(a, marks, 0.0)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used / len(sent) < BYTES_PER_MARK


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(1, 400)), max_size=20
    ),
    st.tuples(st.integers(0, 3), st.integers(1, 400)),
)
def test_more_than_the_common_prefix_is_never_expected(
    sends: list[tuple[str, int, int]], asked: tuple[int, int]
) -> None:
    def tokens(kind: int, length: int) -> "array[int]":
        return array("I", [*range(100), *[kind] * length])

    sent, holdings = table(), {name: Holdings(name) for name in "abc"}
    for worker, kind, length in sends:
        sent.record(holdings[worker], sent.marks(Prompt("m", tokens(kind, length))), 0.0)
    kind, length = asked
    for worker, (speculative, approximate) in sent.expected(
        sent.marks(Prompt("m", tokens(kind, length))), 0.0
    ).items():
        own = [(k, n) for name, k, n in sends if name == worker]
        most = max(100 + (min(n, length) if k == kind else 0) for k, n in own)
        assert 0 < speculative == approximate <= most
