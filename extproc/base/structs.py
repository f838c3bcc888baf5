"""Base classes of the values in compiled modules: mypyc ignores the keywords of a class.

There, the options of a msgspec.Struct (frozen, unknown to the garbage collector) take effect only
if they are inherited. The keywords are still written for plain Python and mypy.
"""

import msgspec


class Frozen(msgspec.Struct, frozen=True):
    """An immutable value."""


class Light(msgspec.Struct, frozen=True, gc=False):
    """An immutable value that can be in no reference cycle."""


class LightByIdentity(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Like `Light`, but equal only to itself."""


class Record(msgspec.Struct, eq=False):
    """A mutable object, equal only to itself."""


class LightRecord(msgspec.Struct, eq=False, gc=False):
    """Like `Record`, but can be in no reference cycle."""
