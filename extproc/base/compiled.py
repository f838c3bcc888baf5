"""Chooses between what is compiled (the folders `native`) and its twin in Python.

Both do the same; tests compare them.
"""

from typing import TypeVar

T = TypeVar("T")


def compiled_or(name: str, plain: T) -> T:
    """Returns what has this name in the compiled core, or else its twin.

    There is no compiled core where there was no C compiler at installation.
    """
    try:
        import extproc._core as core
    except ImportError:
        return plain
    found: T = getattr(core, name)
    return found
