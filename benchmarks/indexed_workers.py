"""KVSteer's side of the index benchmark: the only module with the project's own interfaces."""

from collections.abc import Mapping, Sequence
from random import Random

from workload import BLOCK_SIZE, MODEL, Tokens

from extproc.requests.request import PLAIN_REQUEST
from extproc.routing.candidates.eligibility import Candidate
from extproc.routing.decide import decide
from extproc.routing.decision import Decision
from extproc.routing.inputs.query import Query
from extproc.routing.inputs.snapshot import Snapshot
from extproc.routing.load.loads import Loads
from kvstate.index.index import Index
from kvstate.index.owner import Owner
from kvstate.overlap import Prompt
from kvstate.steps import finished

_SECRET = 0x9E37_79B9_7F4A_7C15


# What rows call it.
CORE = "compiled core"


class IndexedWorkers:
    """An index of this many workers, and the pick on top of it."""

    def __init__(self, workers: int) -> None:
        self._index = Index(_SECRET)
        self._owners = [self._owner(str(number)) for number in range(workers)]
        self._load = Loads({}).load
        self._workers = [Candidate(str(n), f"10.0.0.{n}:8000") for n in range(workers)]
        self._rng = Random(3)

    def _owner(self, worker: str) -> Owner:
        owner = self._index.add(worker, 0, MODEL)
        owner.trusted = True
        return owner

    def apply(self, worker: int, payload: bytes) -> None:
        """Decodes one message of a worker and applies it."""
        finished(self._owners[worker].applying(payload))

    def overlaps(self, tokens: Tokens) -> Mapping[int, int]:
        """Returns the blocks that each worker holds of a prompt, without workers that hold none."""
        found = self._index.overlaps(Prompt(MODEL, tokens))
        return {int(worker): sum(overlap.tiers) for worker, overlap in found.items()}

    def look_up(self, prompts: Sequence[Tokens]) -> None:
        """Looks prompts up."""
        overlaps = self._index.overlaps
        for tokens in prompts:
            overlaps(Prompt(MODEL, tokens))

    def pick(self, tokens: Tokens) -> Decision:
        """Returns the whole decision on a prompt."""
        prompt = Prompt(MODEL, tokens)
        held = [self._index.overlaps(prompt)]
        snapshot = Snapshot(self._workers, held, self._load, "cost", 0)
        return decide(PLAIN_REQUEST, Query(MODEL, [prompt]), snapshot, 0.0, self._rng)

    def picked_blocks(self, tokens: Tokens) -> int:
        """Returns how many blocks of a prompt the picked worker holds."""
        return self.pick(tokens).basis.certain_tokens // BLOCK_SIZE
