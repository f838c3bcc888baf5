"""Counts the instructions of copies of a process that has started, with valgrind.

Few and many of the same work, each by a copy of one process: what the start does, which depends on
time, is in both alike, and the difference is the work's.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

from measure import CannotRunError


def instructions_of_copies(arguments: Sequence[str]) -> list[int]:
    """Returns the instructions of each copy that a Python process makes, in the order of their
    ends.

    arguments: of Python.

    Raises:
        CannotRunError: valgrind is missing.
    """
    if shutil.which("valgrind") is None:
        raise CannotRunError("valgrind is missing: apt-get install valgrind")
    command = ["valgrind", "--tool=cachegrind", "--cache-sim=no"]
    command += ["--cachegrind-out-file=/dev/null", sys.executable, *arguments]
    ran = subprocess.run(
        command, check=False, capture_output=True, text=True,
        env={**os.environ, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    assert not ran.returncode, ran.stderr
    found = re.findall(r"I +refs: +([\d,]+)", ran.stderr)
    return [int(one.replace(",", "")) for one in found[:-1]]  # the last is the process itself


def wait_for(child: int) -> None:
    """Waits until a copy of this process has ended."""
    _, status = os.waitpid(child, 0)
    assert not status, "a copy failed"
