"""The secret of the block keys that several processes of a host have in common.

Without one secret they could not use each other's rows. The first process knows it from its state
file or draws it, and writes it to their private directory; the others read it there.
"""

import asyncio
import contextlib
import os
from pathlib import Path

# In the common directory.
KEYS = "keys"
_BYTES = 8

# How long another process waits for the first one, and how often it looks.
FIRST_SECONDS = 2.0
LOOK_SECONDS = 0.01


async def common_secret(
    directory: str, number: int, own: int, first_seconds: float = FIRST_SECONDS
) -> int:
    """Returns the secret of all processes.

    number: of this process, from 0. own: the secret to be used if there is none yet.

    Raises:
        OSError: it cannot be written.
    """
    path = Path(directory) / KEYS
    loop = asyncio.get_running_loop()
    until = loop.time() + (first_seconds if number else 0.0)
    while (found := _read(path)) is None and loop.time() < until:  # noqa: ASYNC110 - no event
        await asyncio.sleep(LOOK_SECONDS)
    return _first(path, number, own) if found is None else found


def _first(path: Path, number: int, own: int) -> int:
    """Writes the secret, unless another process has just done so; returns which it is."""
    new = path.with_name(f"{number}.{KEYS}")
    new.unlink(missing_ok=True)
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "wb") as stream:
        stream.write(own.to_bytes(_BYTES, "big"))
    with contextlib.suppress(FileExistsError):
        path.hardlink_to(new)  # unlike a renaming, this does not replace another's
    new.unlink()
    found = _read(path)
    return own if found is None else found


def _read(path: Path) -> int | None:
    """Returns the secret that is written, None if none is."""
    try:
        secret = path.read_bytes()
    except FileNotFoundError:
        return None
    return int.from_bytes(secret, "big") if len(secret) == _BYTES else None
