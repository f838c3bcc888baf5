from collections.abc import Iterator

import pytest

from extproc.observing.course import NO_TRACE, Course


def ticking(*times: float) -> Iterator[float]:
    return iter(times)


def test_phases_follow_one_another() -> None:
    times = ticking(1, 2, 4, 4, 5, 8)
    course = Course(lambda: next(times), "parent")
    course.parsed()
    course.tokenized()
    assert course.timed(len)("four") == 4
    assert course.picked() == 7
    assert list(course.phases()) == [
        ("parse", 1, 2),
        ("tokens", 2, 4),
        ("lookup", 4, 5),
        ("pick", 5, 8),
    ]
    assert (course.traceparent, course.trace) == ("parent", NO_TRACE)


def test_a_request_without_a_prompt_is_only_picked_for() -> None:
    times = ticking(1, 3)
    course = Course(lambda: next(times))
    course.picked()
    assert list(course.phases()) == [("pick", 1, 3)]


def test_all_prompts_of_a_request_are_one_lookup() -> None:
    times = ticking(1, 2, 3, 5, 7, 9)
    course = Course(lambda: next(times))
    look = course.timed(len)
    look("a")
    look("b")
    course.picked()
    phase, began, ended = next(iter(course.phases()))
    assert (phase, began) == ("lookup", 1)
    assert ended == pytest.approx(4)
