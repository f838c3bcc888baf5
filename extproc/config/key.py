"""One key of the configuration, as a field of its section's dataclass.

Units are in the names: _ms milliseconds, _bytes bytes, _tokens tokens.
"""

from dataclasses import MISSING, field
from typing import Any


def key(
    doc: str, default: Any = MISSING, *, choices: tuple[str, ...] = (), minimum: int = 0
) -> Any:
    """A configuration key: its meaning and unit, its default if any, and what is allowed."""
    metadata = {"doc": doc, "choices": choices, "minimum": minimum}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)
