"""The kinds of values that compiled modules define: mypyc ignores the keywords of a class.

What a msgspec.Struct is to be (frozen, unknown to the garbage collector) is then inherited alone.
The keywords are written all the same: plain Python and mypy read them.
"""

import msgspec


class Frozen(msgspec.Struct, frozen=True):
    """A value that does not change."""


class Light(msgspec.Struct, frozen=True, gc=False):
    """A value that does not change, and that no circle of references can go through."""


class Alone(msgspec.Struct, frozen=True, gc=False, eq=False):
    """As `Light`, and equal to nothing but itself."""


class Record(msgspec.Struct, eq=False):
    """An object that changes, and is equal to nothing but itself."""


class LightRecord(msgspec.Struct, eq=False, gc=False):
    """As `Record`, and no circle of references can go through it."""
