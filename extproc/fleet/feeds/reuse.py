"""What each worker's engine reuses of the blocks that it holds: by its release, and by outcomes."""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from extproc.base.engine import SGLANG, VLLM, Engine, Release
from extproc.fleet.records.worker import Worker
from extproc.observing.outcomes import DRAFT, GROUPS, Outcome
from extproc.proof.reuse import DRAFT_DROP
from kvstate.feeds.feed import FeedState
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Overlap
from kvstate.reuse import NO_RULES, ReuseRules

log = logging.getLogger("kvsteer.workers")

# vLLM announces the removal of each copy of a block up to this release (block_pool.py, 0.9 to
# 0.33); changes under discussion announce only that of the last one (vllm#55092).
LAST_WITH_EACH_COPY = Release(0, 33, 999)

# Why a worker's credit is uncertain whatever its outcomes are.
SILENT = "SGLang announces no removals of windows and states"


def rules_by_release(engine: Engine | None) -> ReuseRules:
    """Returns the rules of an engine's release; of unknown ones, only what events show counts."""
    if engine is None or engine.name != VLLM:
        return NO_RULES
    return ReuseRules(announces_copies=engine.release <= LAST_WITH_EACH_COPY)


class Reuse:
    """What the workers' engines reuse.

    records: of the workers, by name. is_hybrid: whether the model of a worker has, by its files,
    several kinds of attention.
    """

    def __init__(
        self,
        fleet: FollowedWorkers,
        records: Mapping[str, Worker],
        is_hybrid: Callable[[Worker], bool],
    ) -> None:
        self._blocks = fleet.blocks
        self._feeds = fleet.feeds
        self._records = records
        self._is_hybrid = is_hybrid

    def note_followed(self, worker: Worker) -> None:
        """Applies what is known of a worker to its feed."""
        by_release = rules_by_release(worker.engine)
        is_void = worker.void_at is not None
        is_certain = not (worker.reuse.doubt or self._is_silent(worker) or is_void)
        self._blocks.note_rules(
            worker.name,
            by_release._replace(draft_drop=worker.reuse.draft_drop, is_certain=is_certain),
        )

    def note_engine(self, worker: Worker) -> None:
        """Notes that a worker's engine became known, or is another one."""
        worker.reuse.forget()
        if worker.identity.drafts:
            worker.reuse.suspect_draft()
        self.note_followed(worker)

    def note_outcome(self, outcome: Outcome) -> None:
        """Compares what a worker could reuse of a prompt with what it reported."""
        worker, cached = self._records.get(outcome.worker), outcome.reported.cached_tokens
        overlap = outcome.overlaps.get(outcome.worker)
        if worker is None or cached is None or overlap is None or not self._is_comparable(outcome):
            return
        error, unit = _reusable(overlap) - cached, self._unit(worker, overlap.block_size)
        if overlap.held_tokens < unit or (error > 0 and self._is_evicted(outcome, overlap)):
            return
        findings, before = worker.reuse, worker.reuse.as_json()
        findings.note(error, unit, has_groups=self._has_groups(worker))
        if findings.as_json() != before:
            self._tell(worker)
            self.note_followed(worker)

    def cause(self, outcome: Outcome) -> str:
        """Returns why the outcome of a request is not as predicted, if its engine's rules are."""
        worker, cached = self._records.get(outcome.worker), outcome.reported.cached_tokens
        overlap = outcome.overlaps.get(outcome.worker)
        if worker is None or cached is None or overlap is None:
            return ""
        error, has_groups = _reusable(overlap) - cached, self._has_groups(worker)
        return worker.reuse.cause(
            error,
            self._unit(worker, overlap.block_size),
            has_groups=has_groups,
            are_known=self._are_groups_known(worker),
        )

    def uncertain_because(self, name: str) -> str:
        """Returns why all of a worker's credit is uncertain: DRAFT or GROUPS, "" if it is not."""
        worker = self._records.get(name)
        if worker is None:
            return ""
        if worker.reuse.doubt:
            return DRAFT if worker.reuse.doubt == DRAFT_DROP else GROUPS
        return "" if self._are_groups_known(worker) else GROUPS

    def as_json(self, worker: Worker) -> dict[str, Any]:
        """Returns the entry of GET /workers."""
        groups = self._blocks.other_groups(worker.name)
        block_size = self._blocks.block_size(worker.name) or 1
        findings = worker.reuse.as_json()
        unknown = "" if groups.are_known else "what its attention groups need is not known"
        silent = SILENT if self._is_silent(worker) else ""
        return {
            "other_groups": [{"block_size": size, "blocks": need} for size, need in groups.needs],
            "unit_tokens": self._unit(worker, block_size),
            "draft_drop": findings["draft_drop"],
            "uncertain_because": silent or unknown or findings["uncertain_because"],
        }

    def _has_groups(self, worker: Worker) -> bool:
        return self._blocks.other_groups(worker.name).are_there or self._is_silent(worker)

    def _are_groups_known(self, worker: Worker) -> bool:
        """Whether its feed shows what its groups hold, if it has several."""
        return self._blocks.other_groups(worker.name).are_known and not self._is_silent(worker)

    def _is_silent(self, worker: Worker) -> bool:
        """Whether its engine does not announce what windows and states hold."""
        engine = worker.engine
        return engine is not None and engine.name == SGLANG and self._is_hybrid(worker)

    def _unit(self, worker: Worker, block_size: int) -> int:
        """Returns the tokens to which the engine aligns what it reuses."""
        needs = self._blocks.other_groups(worker.name).needs
        return math.lcm(block_size, *(size for size, _ in needs))

    def _is_comparable(self, outcome: Outcome) -> bool:
        name, counted = outcome.worker, outcome.counted_tokens
        is_counted = counted in (None, outcome.prompt_tokens)
        is_live = self._feeds.state(name) is FeedState.LIVE and self._feeds.ranks(name) == 1
        return outcome.error_tokens is not None and is_counted and is_live

    def _is_evicted(self, outcome: Outcome, before: Overlap) -> bool:
        """Whether by its feed the worker can reuse less of the prompt now."""
        if outcome.prompt is None:
            return True
        now = self._blocks.overlaps(outcome.prompt).get(outcome.worker)
        return now is None or _reusable(now) < _reusable(before)

    def _tell(self, worker: Worker) -> None:
        findings = worker.reuse
        if findings.doubt:
            log.warning(
                "worker %s: its engine reuses less than its events show (%s); its overlap counts"
                " as uncertain",
                worker.name,
                findings.doubt,
            )
        else:
            log.info(
                "worker %s: its outcomes agree with its events; it computes %d of the last units"
                " that it holds again",
                worker.name,
                findings.draft_drop,
            )


def _reusable(overlap: Overlap) -> int:
    return overlap.certain_tokens + overlap.uncertain_tokens
