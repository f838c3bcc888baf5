"""What workers hold of a request that their engines read differently: each by its own dialect."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from extproc.proof.trust import Trust
from extproc.routing.inputs.query import Query
from kvstate.overlap import Overlap, Prompt

Held = Mapping[str, Overlap]


class _Proofs(Protocol):
    def trust_for(self, forms: int) -> Trust:
        """Returns the trust in workers for a request of these forms."""


def by_variant(
    query: Query, held: Sequence[Held], trusted: Trust, proofs: _Proofs
) -> tuple[list[Held], Trust]:
    """Returns what each worker holds of each prompt, as its own engine reads the request.

    held, trusted: for the query's own prompts and forms. A worker that cannot be told the request
    in tokens holds nothing of it.
    """
    own = {worker: proofs.trust_for(one.forms) for one in query.variants for worker in one.workers}
    merged = [{name: of for name, of in one.items() if name not in own} for one in held]
    for variant in query.variants:
        trust = proofs.trust_for(variant.forms)
        for place, prompt in zip(merged, variant.prompts, strict=False):
            found = trust.overlaps(prompt).items()
            place |= {name: of for name, of in found if name in variant.workers}
    return [*merged], _ByWorker(own, trusted)


class _ByWorker:
    """The trust in workers whose engines read a request differently.

    own: by worker; others: in the workers that are not there.
    """

    def __init__(self, own: Mapping[str, Trust], others: Trust) -> None:
        self._own = own
        self._default = others

    def overlaps(self, prompt: Prompt) -> Held:
        return self._default.overlaps(prompt)

    def state(self, worker: str) -> str:
        return self._own.get(worker, self._default).state(worker)
