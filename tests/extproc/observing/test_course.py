from collections.abc import Iterator

from extproc.observing.course import NO_TRACE, Course


def ticking(*times: float) -> Iterator[float]:
    return iter(times)


def test_phases_follow_one_another() -> None:
    times = ticking(1, 2, 4, 5, 8)
    course = Course(lambda: next(times), "parent")
    course.parsed()
    course.tokenized()
    assert (course.looked(), course.picked()) == (5, 8)
    assert list(course.phases()) == [
        ("parse", 1, 2),
        ("tokens", 2, 4),
        ("lookup", 4, 5),
        ("pick", 5, 8),
    ]
    assert (course.traceparent, course.trace) == ("parent", NO_TRACE)


def test_a_request_without_a_prompt_is_only_picked_for() -> None:
    times = ticking(1, 2, 3)
    course = Course(lambda: next(times))
    assert course.now() == 2
    course.picked()
    assert list(course.phases()) == [("pick", 1, 3)]
