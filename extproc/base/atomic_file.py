"""Replaces files as a whole, so that nobody ever reads a part of one."""

import os
import tempfile
from pathlib import Path

OWNER_ONLY, READABLE_BY_ALL = 0o600, 0o644


def replace_file(path: str, content: bytes, mode: int = OWNER_ONLY, *, is_durable: bool) -> None:
    """Replaces a file, or makes it, with these permissions.

    is_durable: whether the content has to outlast a crash of the machine, which waits for the disk.

    Raises:
        OSError: the file cannot be written; the old one is as it was.
    """
    file, name = tempfile.mkstemp(dir=Path(path).parent, prefix=".kvsteer-")
    try:
        with os.fdopen(file, "wb") as writer:
            writer.write(content)
            writer.flush()
            if is_durable:
                os.fsync(file)
        Path(name).chmod(mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
