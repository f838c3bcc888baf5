"""What is known of an engine's rules that its events do not show."""

from typing import NamedTuple


class ReuseRules(NamedTuple):
    """How a worker's engine announces and reuses blocks.

    announces_copies: it announces the removal of each copy of a block, not only of the last one.
    draft_drop: how many of the last blocks that it holds of a prompt it computes again, because a
    draft model needs their hidden states. is_certain: whether anything that it holds may be
    certain.
    """

    announces_copies: bool = False
    draft_drop: int = 0
    is_certain: bool = True


NO_RULES = ReuseRules()


class OtherGroups(NamedTuple):
    """The attention groups of one rank that hold a window or a state, not the whole prefix.

    ends: hashes at which any of them holds a block. are_known: whether it is known what a prefix
    needs of each. needs: by block size, the blocks that some of them need before its end.
    """

    ends: int = 0
    are_known: bool = True
    needs: tuple[tuple[int, int], ...] = ()

    @property
    def are_there(self) -> bool:
        """Whether there are any."""
        return bool(self.needs) or not self.are_known
