import threading
import time

import pytest

from extproc.tokenizing.cpu_limit import run_within


class PanicError(BaseException):
    """What pyo3 raises where Rust panics is no Exception, either."""


def fail(error: BaseException) -> None:
    raise error


def test_run_within_returns_what_the_work_returns() -> None:
    assert run_within(60, lambda: "done") == "done"


@pytest.mark.parametrize(
    ("raised", "expected"), [(KeyError("a"), KeyError), (PanicError("a"), ValueError)]
)
def test_run_within_raises_what_the_work_raises(
    raised: BaseException, expected: type[Exception]
) -> None:
    with pytest.raises(expected, match="a"):
        run_within(60, lambda: fail(raised))


def test_run_within_gives_up_work_that_uses_too_much_cpu_time() -> None:
    is_over = threading.Event()

    def spin() -> None:
        while not is_over.is_set():
            time.monotonic()

    with pytest.raises(TimeoutError, match=r"more than 0\.2 s of CPU"):
        run_within(0.2, spin)
    is_over.set()
