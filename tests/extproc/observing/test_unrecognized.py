import re

from hypothesis import given
from hypothesis import strategies as st

from extproc.observing.unrecognized import (
    LATEST,
    MAX_CHARACTERS,
    SECONDS,
    TOO_MANY,
    UnrecognizedCollector,
    UnrecognizedRequests,
    shape_of,
)


class Traffic:
    """Requests, recognized or not."""

    def __init__(self) -> None:
        self.calls, self.now = 0, 5.0
        self.seen = UnrecognizedRequests(lambda: self.calls, lambda: self.now)

    def said(self) -> str:
        return "".join(str(one) for one in self.seen.faults())

    def pass_unrecognized(self, count: int, path: str = "/llm/tiny/v1/new") -> None:
        for _ in range(count):
            self.seen.note(path)


def test_few_are_no_fault() -> None:
    traffic = Traffic()
    traffic.pass_unrecognized(TOO_MANY - 1)
    assert not traffic.said()


def test_more_than_a_fifth_are_a_fault_that_shows_the_usual_path() -> None:
    traffic = Traffic()
    traffic.pass_unrecognized(1, "/other")
    traffic.calls = LATEST - TOO_MANY
    traffic.pass_unrecognized(TOO_MANY - 1)
    said = traffic.said()
    assert said.startswith("13 of the last 60 requests with a body have paths of no known API")
    assert "most of them /llm/tiny/v1/new" in said


def test_a_fifth_or_less_is_none() -> None:
    traffic = Traffic()
    traffic.pass_unrecognized(1)
    traffic.calls = LATEST - TOO_MANY + 1
    traffic.pass_unrecognized(TOO_MANY - 1)
    assert not traffic.said()


def test_fault_ends_with_recognized_requests_or_with_time() -> None:
    traffic = Traffic()
    traffic.pass_unrecognized(TOO_MANY)
    assert traffic.said()
    traffic.now += SECONDS + 1
    assert not traffic.said()
    traffic.pass_unrecognized(TOO_MANY)
    traffic.calls += LATEST
    assert not traffic.said()


def test_names_and_ids_in_paths_are_not_shown() -> None:
    shown = "/llm/*/v1/new-api"
    assert shape_of("/llm/0f9a-77/v1/new-api") == shown
    assert shape_of("/llm/jane@example.com/v1/new-api") == shown
    assert shape_of(f"/llm/{'x' * 25}/v1/new-api") == shown


@given(st.text())
def test_shape_is_short_and_printable(path: str) -> None:
    shown = shape_of(path)
    assert len(shown) <= MAX_CHARACTERS
    assert re.fullmatch(r"[a-z0-9/*._-]*", shown)


def test_all_are_counted() -> None:
    traffic = Traffic()
    traffic.pass_unrecognized(3)
    (family,) = UnrecognizedCollector(traffic.seen).collect()
    assert [one.value for one in family.samples] == [3]
