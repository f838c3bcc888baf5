"""What is known of one publisher's attention groups, and so which of their blocks to believe.

A model with several kinds of attention stores every prompt once for each group of its layers. Only
groups that hold the whole prefix are indexed. Stores name their group's kind since vLLM 0.22;
what does not name it (removals, copies) follows what its group was last said to be. vLLM 0.20 has
groups without kinds: one such group is the only one there is, but of two nobody can tell which
holds the prefix, and nothing that was stored for either can be believed.
"""

from enum import Enum, IntEnum

# More groups than any model has; what comes beyond is not indexed.
MAX_GROUPS = 64


class Admission(IntEnum):
    """What becomes of blocks of a group."""

    INDEXED = 0
    OTHER_GROUP = 1
    DOUBTFUL = 2


class _State(Enum):
    UNNAMED = 0
    PREFIX = 1
    OTHER = 2
    CONTRADICTED = 3  # believed to hold the prefix, then named as a kind that does not


class Groups:
    """The attention groups of one publisher."""

    def __init__(self) -> None:
        self._states: dict[int, _State] = {}

    def stored(self, group: int | None, *, holds_prefix: bool | None) -> Admission:
        """Notes a store; holds_prefix is None where its kind is not named."""
        if group is None:
            return Admission.OTHER_GROUP if holds_prefix is False else Admission.INDEXED
        state = self._states.get(group)
        if state is None and len(self._states) == MAX_GROUPS:
            return Admission.OTHER_GROUP
        self._states[group] = _next(state, holds_prefix=holds_prefix)
        return self.admission(group)

    def admission(self, group: int | None) -> Admission:
        """What becomes of blocks of a group, by what was stored so far."""
        state = None if group is None else self._states.get(group)
        if state is _State.OTHER:
            return Admission.OTHER_GROUP
        unnamed = sum(other is _State.UNNAMED for other in self._states.values())
        if state is _State.CONTRADICTED or (state is _State.UNNAMED and unnamed > 1):
            return Admission.DOUBTFUL
        return Admission.INDEXED

    def forget(self) -> None:
        """Nothing is known any more: the publisher may be another one."""
        self._states.clear()


def _next(state: _State | None, *, holds_prefix: bool | None) -> _State:
    if holds_prefix is None:
        return state or _State.UNNAMED
    if holds_prefix:
        return _State.PREFIX
    return _State.OTHER if state in {None, _State.OTHER} else _State.CONTRADICTED
