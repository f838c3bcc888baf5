"""What the index knows of one rank."""

from collections import Counter
from dataclasses import dataclass

from kvstate.core import Core, OwnerStatus
from kvstate.events import BlocksStored
from kvstate.orphans import Orphanage

# What a block takes in the compiled core at the most, tables half grown and all.
BYTES_PER_BLOCK = 64

# Ranks that a worker really has are never given less, however many it is said to have.
MIN_BYTES_OF_RANK = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """What one worker may make us remember: a publisher gone wrong must not take the memory."""

    bytes: int = 256 * 1024 * 1024
    orphans: int = 65_536
    orphan_bytes: int = 32 * 1024 * 1024

    @property
    def blocks(self) -> int:
        """The most blocks."""
        return self.bytes // BYTES_PER_BLOCK

    def share(self, ranks: int) -> "Limits":
        """What one of a worker's ranks may take of it."""
        least = min(self.bytes, MIN_BYTES_OF_RANK)
        return Limits(
            max(self.bytes // ranks, least), self.orphans // ranks, self.orphan_bytes // ranks
        )


class Owner:
    """A rank: who it is, what is counted of it, and its orphans; the core has its blocks."""

    def __init__(
        self, core: Core, number: int, worker: str, rank: int, model: str, limits: Limits
    ) -> None:
        self.limits = limits
        self.number = number
        self.worker = worker
        self.rank = rank
        self.model = model
        self.orphans = Orphanage()
        self._core = core
        self._trusted = False
        self._counts: Counter[str] = Counter()
        self._names_salts: bool | None = None
        self._names_loras: bool | None = None

    @property
    def trusted(self) -> bool:
        """Whether its certain blocks count as such now."""
        return self._trusted

    @trusted.setter
    def trusted(self, trusted: bool) -> None:
        if trusted != self._trusted:
            self._trusted = trusted
            self._core.trust(self.number, trusted)

    @property
    def status(self) -> OwnerStatus:
        """Counts of its blocks."""
        return self._core.status(self.number)

    @property
    def block_size(self) -> int | None:
        """Tokens in a block, as its last store had it."""
        return self.status["block_size"] or None

    @property
    def blocks(self) -> int:
        """Block hashes held, over all media."""
        return self.status["blocks"]

    @property
    def uncertain_blocks(self) -> int:
        """Those of them that were stored before a hole."""
        return sum(self._core.tiers(self.number, True))  # noqa: FBT003 - compiled, positional

    @property
    def doubted_blocks(self) -> int:
        """Those stored since, but on tiers whose source is not known to announce removals."""
        doubted = self.status["doubted"]
        held = self._core.tiers(self.number, False)  # noqa: FBT003 - compiled, positional
        return sum(count for tier, count in enumerate(held) if doubted >> tier & 1)

    @property
    def counts(self) -> Counter[str]:
        """What was counted, by name."""
        status = self.status
        core = Counter(
            removed_unknown=status["removed_unknown"],
            restored_with_other_tokens=status["restored_with_other_tokens"],
            over_limit=status["over_limit"],
            copied_unknown=status["copied_unknown"],
        )
        return +(self._counts + core)

    def count(self, name: str) -> None:
        """Counts one under this name."""
        self._counts[name] += 1

    @property
    def names_salts(self) -> bool | None:
        """Whether its stores would say so if there was a cache salt; None before it is known.

        Where they would not, a salted block looks like an unsalted one.
        """
        return _either(self._core.layout(self.number)[0], self._names_salts)

    @property
    def names_loras(self) -> bool | None:
        """Whether its stores would name an adapter; None before it is known."""
        return _either(self._core.layout(self.number)[1], self._names_loras)

    def note_layout(self, event: BlocksStored) -> None:
        """Notes what a store shows of its layout."""
        self._names_salts = _either(event.names_salts, self._names_salts)
        self._names_loras = _either(event.names_loras, self._names_loras)

    def forget_layout(self) -> None:
        """Forgets what was learned of its layouts and groups: it may be another engine now."""
        self._names_salts = self._names_loras = None
        self._core.forget_layout(self.number)


def _either(one: bool | None, other: bool | None) -> bool | None:  # noqa: FBT001 - facts, not modes
    return other if one is None else one or bool(other)
