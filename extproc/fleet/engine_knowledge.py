"""What is known of the workers' engines, and what follows once one is known to be another."""

import math
from collections.abc import Mapping

from extproc.base.attention import has_hybrid_files
from extproc.base.engine import RUST
from extproc.config.schema import Config
from extproc.fleet.candidates import Candidates
from extproc.fleet.feeds.reuse import Reuse
from extproc.fleet.identity.identifying import Identifying
from extproc.fleet.proof.verifying import Verifying
from extproc.fleet.records.shared import SharedByFleet
from extproc.fleet.records.worker import Worker
from extproc.proof.golden_forms import FormEncoder
from extproc.proof.trust import Proofs
from extproc.requests.dialect import Dialect, Printed, rivals_of
from extproc.routing.candidates.pins import PinFindings


class EngineKnowledge:
    """Knows each worker's engine, and what is proved of it.

    encoders: local tokenizers, by model.

    identifying: asks workers which engine they run. verifying: compares their tokens with those
    computed here. proofs: the state of their tokens. reuse: what their engines reuse.
    """

    def __init__(
        self, shared: SharedByFleet, candidates: Candidates, encoders: Mapping[str, FormEncoder]
    ) -> None:
        followed, records = shared.followed, shared.table.by_name
        self._records = records
        self._candidates = candidates
        self.proofs = Proofs(followed, records, shared.monotonic, candidates.block_size)
        hybrids = _hybrid_models(shared.config)
        self.reuse = Reuse(followed, records, lambda worker: candidates.model_of(worker) in hybrids)
        self.identifying = Identifying(shared)
        self.verifying = Verifying(
            shared,
            encoders,
            self.proofs,
            candidates.model_of,
            candidates.dialect_of,
            self._note_dialect,
        )
        self.proofs.watch(self._try_rival)
        self.identifying.watch(self._note_engine)

    def note_printed(self, worker: Worker, printed: Printed) -> None:
        """Notes how a worker prints the tools of responses."""
        worker.printed = printed
        self.proofs.note_printing(worker)
        self._candidates.note_change()

    def note_restart(self, worker: Worker) -> None:
        """Notes that a worker may have been restarted with other files."""
        self.proofs.restarted(worker)
        self.verifying.ask_now(worker)
        self.identifying.ask_now(worker)

    def _note_dialect(self, worker: Worker, dialect: Dialect) -> None:
        """Notes which dialect a worker has shown."""
        self.note_printed(worker, dialect.tools)

    def _try_rival(self, name: str) -> None:
        """Tries the next way of printing tools at a worker that does not print them so."""
        worker = self._records.get(name)
        dialect = None if worker is None else self._candidates.dialect_of(worker)
        rivals = () if dialect is None else rivals_of(dialect)
        if worker is not None and rivals:
            self._note_dialect(worker, rivals[0])

    def _note_engine(self, name: str) -> None:
        """Notes that a worker's engine changed: what was proved for its releases counts no more."""
        worker = self._records.get(name)
        if worker is not None:
            self.proofs.note_engine(worker)
            worker.printed = None
            worker.pin_findings = PinFindings()
            self.reuse.note_engine(worker)
            self._candidates.pins.note_change()
        self._candidates.note_change()
        if worker is None or worker.engine is None:
            return
        was_early = (
            worker.golden_questions.dialect is None and worker.golden_questions.at > -math.inf
        )
        if worker.engine.front_end == RUST or was_early:
            self.verifying.ask_now(worker)  # what it was asked as another one proves little


def _hybrid_models(config: Config) -> set[str]:
    """Returns the models that have, by their files, several kinds of attention."""
    return {
        one.name
        for one in config.models
        if isinstance(one.tokenizer, str) and has_hybrid_files(one.tokenizer)
    }
