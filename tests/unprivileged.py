"""A process that may read little, as services are: as root, tests could read everything."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

NOBODY = 65_534


@contextlib.contextmanager
def unprivileged(directory: Path) -> Iterator[None]:
    """Runs the block as nobody if this process is root's; others have few rights as they are.

    directory: what is in it can be reached all the same, as far as its own modes allow it.
    """
    if os.getuid():
        yield
        return
    for one in (directory, *directory.parents[:-2]):  # pytest's own are closed to others
        one.chmod(0o755)
    os.setresuid(NOBODY, NOBODY, 0)
    try:
        yield
    finally:
        os.setresuid(0, 0, 0)
