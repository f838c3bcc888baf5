"""Work that is given up after a limited CPU time, though nothing can stop it."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

_LOOK_SECONDS = 0.05

Done = TypeVar("Done")


def run_within(cpu_seconds: float, work: Callable[[], Done]) -> Done:
    """Returns the result of work that runs in a thread of its own.

    cpu_seconds: the most that this process may use meanwhile. The thread of work that is given up
    goes on, so the process should end soon. Work that keeps Python's lock is not given up.

    Raises:
        TimeoutError: it takes more.
        ValueError: it ends with an error of another kind than Exception, such as a library's panic.
        Exception: the work raises it.
    """
    done: list[Done] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # noqa: BLE001 - it is raised in the other thread
            failed.append(error)

    thread = threading.Thread(target=run, name="limited", daemon=True)
    ends = time.process_time() + cpu_seconds
    thread.start()
    while thread.is_alive():
        thread.join(_LOOK_SECONDS)
        if thread.is_alive() and time.process_time() >= ends:
            raise TimeoutError(f"it takes more than {cpu_seconds:g} s of CPU")
    if failed and not isinstance(failed[0], Exception):
        raise ValueError(str(failed[0])) from None
    if failed:
        raise failed[0]
    return done[0]
