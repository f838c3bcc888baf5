"""What a configuration says otherwise than the one that runs."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass


def changed_keys(running: object, read: object, path: str = "") -> Iterator[str]:
    """The keys whose values differ, as docs/configuration.md has them, without those values.

    running, read: two of the same section. Lists, as of workers, are one key.
    """
    if not is_dataclass(running) or type(running) is not type(read):
        if running != read:
            yield path
        return
    for field in fields(running):
        before, now = getattr(running, field.name), getattr(read, field.name)
        yield from changed_keys(before, now, f"{path}.{field.name}" if path else field.name)
