"""One key of the configuration, as a field of its section's dataclass.

Units are in the names: _ms milliseconds, _bytes bytes, _tokens tokens.
"""

from dataclasses import MISSING, field
from typing import Any

# A number that is larger is a slip of the keyboard; timers and counters have room for these.
MAX_NUMBER = 2**31 - 1
MAX_MS = 366 * 24 * 3600 * 1000
MAX_BYTES = 2**40


def key(
    doc: str,
    default: Any = MISSING,
    *,
    choices: tuple[str, ...] = (),
    minimum: int = 0,
    maximum: int | None = None,
) -> Any:
    """A configuration key: its meaning and unit, its default if any, and what is allowed.

    maximum: where it is less than `most` of the key's name.
    """
    metadata = {"doc": doc, "choices": choices, "minimum": minimum, "maximum": maximum}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def most(name: str) -> int:
    """The largest number that a key of this name takes."""
    if name.endswith("_ms"):
        return MAX_MS
    return MAX_BYTES if name.endswith("_bytes") else MAX_NUMBER
