"""What each worker holds: answers from the index, by the rules of the worker's engine."""

from collections.abc import Sequence

from msgspec.structs import replace

from kvstate.following.adapters import AdapterNumbers
from kvstate.following.rank_table import RankTable
from kvstate.index.index import Index
from kvstate.overlap import Overlap, Prompt, Tier, of_any_rank, within
from kvstate.reuse import NO_RULES, OtherGroups, ReuseRules


class WorkerBlocks:
    """The blocks that workers hold.

    ranks: those that are followed. names_ranks: whether requests can name the rank of a worker that
    computes them; if not, only blocks that all its ranks hold are certain.
    """

    def __init__(self, index: Index, ranks: RankTable) -> None:
        self.names_ranks = False
        self._index = index
        self._ranks = ranks
        self._by_worker = ranks.by_worker
        self._adapters = AdapterNumbers()
        self._rules: dict[str, ReuseRules] = {}  # of each worker that is followed
        self._uncertain: set[str] = set()  # workers whose rules make every block uncertain

    def add(self, worker: str, adapters: Sequence[tuple[int, str]]) -> ReuseRules:
        """Notes a worker that is followed from now on; returns the rules of its engine.

        adapters: numbers and names of adapters that its events name by number only.
        """
        self._adapters.add(worker, adapters)
        return self._rules.setdefault(worker, NO_RULES)

    def remove(self, worker: str) -> None:
        """Forgets what is known of a worker besides its blocks."""
        self._rules.pop(worker, None)
        self._uncertain.discard(worker)
        self._adapters.remove(worker)

    def note_rules(self, worker: str, rules: ReuseRules) -> None:
        """Notes how a worker's engine announces and reuses blocks, if the worker is followed."""
        if self._rules.get(worker, rules) != rules:
            self._rules[worker] = rules
            self._uncertain.discard(worker)
            if not rules.is_certain:
                self._uncertain.add(worker)
            for each in self._ranks.of(worker):
                each.owner.note_rules(rules)

    def overlaps(self, prompt: Prompt) -> dict[str, Overlap]:
        """Returns the overlap of every worker that holds the prompt's first block.

        If a worker's events name adapters by unknown numbers only, the blocks of any of them may
        match: they count as uncertain.
        """
        found = self._overlaps_of_ranks(prompt)
        if self._uncertain:
            for worker in self._uncertain & found.keys():
                found[worker] = of_any_rank(found[worker])
        return found

    def _overlaps_of_ranks(self, prompt: Prompt) -> dict[str, Overlap]:
        found = self._index.overlaps(prompt, names_ranks=self.names_ranks)
        if isinstance(prompt.lora, str):
            for number, workers in self._adapters.workers_by_number(prompt.lora).items():
                numbered = replace(prompt, lora=number)
                by_number = self._index.overlaps(numbered, names_ranks=self.names_ranks)
                found |= {name: by_number[name] for name in workers & by_number.keys()}
            unsure = self._index.overlaps_by_number(prompt)
            if unsure:
                known = self._adapters.workers()
                found = {name: unsure[name] for name in unsure.keys() - known} | found
        sure = prompt.sure_tokens
        return found if sure is None else {name: within(one, sure) for name, one in found.items()}

    def overlap_of_rank(self, worker: str, rank: int, prompt: Prompt) -> Overlap | None:
        """Returns the overlap of one rank of a worker, None if it lacks the first block."""
        return self._index.overlap_of_rank(worker, rank, prompt)

    def tokens_on(self, prompt: Prompt, tier: Tier) -> dict[str, int]:
        """Returns how many first tokens of a prompt workers certainly hold on one tier, by name."""
        found = self._index.tokens_on(prompt, tier)
        sure = prompt.sure_tokens
        return found if sure is None else {name: min(one, sure) for name, one in found.items()}

    def watch(self, worker: str, slot: int, prompt: Prompt, block_size: int) -> bool:
        """Watches from now on whether a worker stores a prompt whole, as `Owner.watch` does.

        Returns False if any of its ranks cannot.
        """
        adapter = prompt.lora
        numbers = self._adapters.numbers(worker, adapter) if isinstance(adapter, str) else []
        ranks = self._ranks.of(worker)
        watched = [each.owner.watch(slot, prompt, block_size, numbers) for each in ranks]
        return bool(watched) and all(watched)

    def was_stored(self, worker: str, slot: int) -> bool:
        """Returns whether any rank has stored the prompt watched in a slot since."""
        return any(each.owner.was_stored(slot) for each in self._ranks.of(worker))

    def removed_at(self, worker: str, prompt: Prompt, blocks: int) -> float | None:
        """Returns when a worker last removed the block of a prompt behind so many of its blocks.

        By the time told last before (`Index.note_time`); None if it is not remembered.
        """
        adapter = prompt.lora
        numbers = self._adapters.numbers(worker, adapter) if isinstance(adapter, str) else []
        ranks = self._ranks.of(worker)
        found = [each.owner.removed_at(prompt, blocks, numbers) for each in ranks]
        return max((at for at in found if at is not None), default=None)

    def has_removed(self, worker: str) -> bool:
        """Returns whether a worker has ever announced the removal of a block."""
        return any(each.owner.has_removed for each in self._ranks.of(worker))

    def other_groups(self, worker: str) -> OtherGroups:
        """Returns what is known of the other attention groups of a worker's first rank."""
        ranks = self._ranks.of(worker)
        return ranks[0].owner.other_groups() if ranks else OtherGroups()

    def block_size(self, worker: str) -> int | None:
        """Returns the tokens per block, learned from the worker's events; None if not known yet."""
        for each in self._by_worker.get(worker, ()):  # this is called at every pick
            if each.owner.block_size is not None:
                return each.owner.block_size
        return None

    def by_tier(self, worker: str) -> tuple[int, int, int, int]:
        """Returns how many blocks a worker holds on device, host, disk and remote."""
        return self._index.blocks_by_tier(worker)
