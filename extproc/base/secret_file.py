"""Reads secrets from files."""

from pathlib import Path

from extproc.base.errors import StartError

LEAST_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4_096


def secret_in(key: str, path: str, least: int = LEAST_SECRET_BYTES) -> bytes:
    """Returns the content of a file, without surrounding white space.

    key: the configuration key that names the file. least: the fewest bytes it may have.

    Raises:
        StartError: the file cannot be read, or has too few bytes.
    """
    try:
        with Path(path).open("rb") as file:
            secret = file.read(MAX_SECRET_BYTES).strip()
    except OSError as error:
        raise StartError(f"{key}: {path}: {error.strerror}") from None
    if len(secret) < least:
        raise StartError(f"{key}: {path}: has {len(secret)} bytes; {least} are the least")
    return secret
