"""Feeds the state of workers' tokens from live requests, and lowers credit where they differ."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol
from weakref import WeakSet

from extproc.proof.lookups import Lookups, SentRequest, held_tokens, is_stored, may_show
from extproc.proof.state import Comparison, Proof, TokenProof
from extproc.requests.prompt import AGREED_FORMS, BY_RELEASE, PRINTED
from kvstate.feeds.feed import FeedState
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Overlap, Prompt

log = logging.getLogger("kvsteer.tokens")

# The states of a worker whose feed is complete, but whose tokens are refuted or doubted.
DIFFERS, DOUBTED = "differs", "doubted"

# The same for forms that releases read differently, while they are not proved.
UNPROVED = Proof.UNPROVED.value


# Naming a member through its class is a search, which every request would make.
_LIVE = FeedState.LIVE


class HasProof(Protocol):
    """The record of a worker."""

    @property
    def proof(self) -> TokenProof:
        """The state of its tokens."""

    @property
    def lookups(self) -> Lookups:
        """Its requests that will be looked up."""


class Trust(Protocol):
    """What workers are trusted to hold for one request."""

    def overlaps(self, prompt: Prompt) -> Mapping[str, Overlap]:
        """Returns what each worker holds of a prompt: nothing certain if its tokens are refuted."""

    def state(self, worker: str) -> str:
        """Returns the state of a worker's feeds; another one if its tokens are not trusted."""


class Proofs:
    """The state of all workers' tokens.

    records: of the workers, by name. monotonic: returns seconds.
    """

    def __init__(
        self,
        fleet: FollowedWorkers,
        records: Mapping[str, HasProof],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._records = records
        self._monotonic = monotonic
        # weak: a proof ends with the record that it is part of
        self._distrusted: WeakSet[TokenProof] = WeakSet()  # refuted or doubted for some forms
        self._watchers: list[Callable[[str], None]] = []
        # also if all of them have ended: a WeakSet's length takes longer than all else here
        self._has_distrusted = False

    def watch(self, reconsider: Callable[[str], None]) -> None:
        """Has this called with the name of a worker whose tools are not printed as assumed here."""
        self._watchers.append(reconsider)

    def note_sent(
        self, worker: str, prompt: Prompt, forms: int, overlap: Overlap | None
    ) -> SentRequest | None:
        """Notes a request sent to a worker; returns it if it will be looked up, else None.

        prompt: tokenized here. forms: of the request. overlap: what the worker holds of the prompt.
        The caller passes the request to `ended` when it is over, or to `dropped`.
        """
        clock = self._monotonic
        record, now = self._records.get(worker), clock()
        # most requests end here, for less than a microsecond
        if record is None:
            return None
        is_proved = record.proof.is_proved(forms)
        if not record.lookups.is_open(now, is_proved=is_proved):
            return None
        self._look_up_due(worker, record, now)
        return self._kept(worker, record, prompt, forms, overlap)

    def note_golden(self, worker: str, prompt: Prompt, forms: int) -> SentRequest | None:
        """Notes a golden request that will be sent to a worker, as `note_sent` does for others."""
        record = self._records.get(worker)
        if record is None:
            return None
        overlap = self._fleet.overlaps(prompt).get(worker)
        return self._kept(worker, record, prompt, forms, overlap)

    def _kept(
        self, worker: str, record: HasProof, prompt: Prompt, forms: int, overlap: Overlap | None
    ) -> SentRequest | None:
        """Has a request wait until it is looked up; returns it, None if it will not be."""
        now, is_proved = self._monotonic(), record.proof.is_proved(forms)
        if not record.lookups.has_room(now) or self._fleet.state(worker) is not FeedState.LIVE:
            return None
        size = self._fleet.block_size(worker)
        if not may_show(prompt, overlap, size, is_proved=is_proved):
            return None
        batches, slot = self._fleet.batches(worker), record.lookups.free_slot()
        is_watched = size is not None and self._fleet.watch(worker, slot, prompt, size)
        watched = size if is_watched else None
        sent = SentRequest(prompt, forms, held_tokens(overlap), batches, now, slot, watched)
        record.lookups.add(sent, is_proved=is_proved)
        return sent

    def look_up(self, worker: str) -> None:
        """Looks up one request of a worker that is over, if any is due."""
        record = self._records.get(worker)
        if record is not None:
            self._look_up_due(worker, record, self._monotonic())

    def block_size(self, worker: str) -> int | None:
        """Returns the tokens in a worker's block, None if that is not known."""
        return self._fleet.block_size(worker)

    def ended(self, sent: SentRequest) -> None:
        """Notes that a request is over."""
        sent.ended_at = self._monotonic()

    def dropped(self, worker: str, sent: SentRequest) -> None:
        """Notes that a request was refused, or answered elsewhere: it shows nothing."""
        record = self._records.get(worker)
        if record is not None:
            record.lookups.drop(sent)

    def counted(self, worker: str, forms: int, ours: int, engines: int) -> None:
        """Notes how many tokens the prompt of a request has, here and in the engine."""
        record = self._records.get(worker)
        if record is not None and forms:
            before = _logged_state(record.proof)
            record.proof.count(forms, ours, engines, self._monotonic())
            self._note(record.proof, before)
            self._reconsider(worker, record)

    def compared(self, record: HasProof, comparison: Comparison) -> None:
        """Notes the result of golden requests for a worker's tokens."""
        record.proof.compare(comparison, self._monotonic())
        self._mark(record.proof)

    def uncompared(self, record: HasProof, why: str, *, for_now: bool) -> None:
        """Notes why golden requests were not compared; for_now: the worker did not answer."""
        record.proof.uncompared(why, self._monotonic(), for_now=for_now)
        self._mark(record.proof)

    def restarted(self, record: HasProof) -> None:
        """Notes that a worker may have been restarted with other files."""
        record.proof.restart(self._monotonic())
        record.lookups.restart()
        self._mark(record.proof)

    def respoken(self, record: HasProof) -> None:
        """Notes that a worker's engine is another one, or became known."""
        record.proof.forget(BY_RELEASE)
        self._mark(record.proof)

    def reprinted(self, record: HasProof) -> None:
        """Notes that a worker prints tools otherwise than was assumed of requests until now."""
        record.proof.forget(PRINTED)
        record.lookups.restart()
        self._mark(record.proof)

    def trust_for(self, forms: int) -> Trust:
        """Returns the trust in workers for a request of these forms."""
        is_plain = not (self._has_distrusted or forms & BY_RELEASE)
        return self if is_plain else _OfForms(self, forms)

    def overlaps(self, prompt: Prompt, forms: int = AGREED_FORMS) -> Mapping[str, Overlap]:
        """Returns the fleet's overlaps, but nothing certain for workers whose tokens are refuted,
        or not proved where releases differ.

        Those of doubted tokens stay certain: the worker holds these blocks, whatever it will store.
        """
        found = self._fleet.overlaps(prompt)
        if forms & BY_RELEASE:
            return {
                name: overlap if self.is_certain(name, forms) else _uncertain(overlap)
                for name, overlap in found.items()
            }
        for proof in self._distrusted if self._has_distrusted else ():
            overlap = found.get(proof.worker)
            if overlap is not None and proof.refuted & forms and self._is_current(proof):
                found[proof.worker] = _uncertain(overlap)
        return found

    def is_certain(self, worker: str, forms: int) -> bool:
        """Returns whether what a worker holds of a request of these forms may be certain."""
        record = self._records.get(worker)
        if record is None:
            return False
        return not record.proof.refuted & forms and record.proof.is_proved(forms & BY_RELEASE)

    def state(self, worker: str, forms: int = AGREED_FORMS) -> str:
        """Returns the fleet's state; DIFFERS, DOUBTED or UNPROVED if these forms are, so that what
        was sent to the worker counts as well.
        """
        state = self._fleet.state(worker)
        by_release = forms & BY_RELEASE
        is_trusted = state is not FeedState.LIVE or not (self._has_distrusted or by_release)
        record = None if is_trusted else self._records.get(worker)
        if record is None:
            return state.value
        if record.proof.refuted & forms:
            return DIFFERS
        if not record.proof.is_proved(by_release):
            return UNPROVED
        return DOUBTED if record.proof.doubted & forms else state.value

    def is_live(self, worker: str, forms: int) -> bool:
        """Returns whether a worker's feed is complete, and its tokens of these forms trusted."""
        if self._has_distrusted or forms & BY_RELEASE:
            return self.state(worker, forms) == _LIVE
        return self._fleet.state(worker) is _LIVE

    def differs(self, worker: str) -> bool:
        """Returns whether a worker's tokens are refuted for any form."""
        record = self._records.get(worker)
        return record is not None and bool(record.proof.refuted)

    def status(self, worker: str) -> dict[str, Any]:
        """Returns the state of a worker's tokens, as GET /workers shows it."""
        record, now = self._records.get(worker), self._monotonic()
        if record is None:
            return TokenProof(worker).as_json(now)
        self._look_up_due(worker, record, now)
        return record.proof.as_json(now)

    def _look_up_due(self, worker: str, record: HasProof, now: float) -> None:
        """Looks up one request that is over: a step of bounded length, once or twice a second."""
        sent = record.lookups.take_due(now)
        if sent is None or self._fleet.state(worker) is not FeedState.LIVE:
            return
        overlap = self._fleet.overlaps(sent.prompt).get(worker)
        batches, size = self._fleet.batches(worker), self._fleet.block_size(worker)
        was_stored = self._was_stored(worker, sent, size)
        found = is_stored(sent, overlap, batches, size, now, was_stored=was_stored)
        if found is not None:
            before = _logged_state(record.proof)
            record.proof.look_up(sent.forms, now, is_stored=found)
            self._note(record.proof, before)
            self._reconsider(worker, record)

    def _was_stored(self, worker: str, sent: SentRequest, size: int | None) -> bool | None:
        """Returns whether the last block of a prompt was stored since; None if it is not known.

        Before a worker's first store, nothing can be watched for: then what is not held was not
        stored, as long as nothing was removed.
        """
        if sent.block_size == size:
            return self._fleet.was_stored(worker, sent.slot)
        is_first = sent.block_size is None and not self._fleet.has_removed(worker)
        return False if is_first else None

    def _reconsider(self, worker: str, record: HasProof) -> None:
        """Tells that live requests speak against how tools are printed; golden ones count more."""
        proof = record.proof
        if (proof.refuted | proof.doubted) & PRINTED and not proof.is_shown(PRINTED):
            for reconsider in self._watchers:
                reconsider(worker)

    def _is_current(self, proof: TokenProof) -> bool:
        record = self._records.get(proof.worker)
        return record is not None and record.proof is proof

    def _mark(self, proof: TokenProof) -> None:
        if proof.refuted or proof.doubted:
            self._distrusted.add(proof)
        else:
            self._distrusted.discard(proof)
        self._has_distrusted = bool(self._distrusted)

    def _note(self, proof: TokenProof, before: tuple[Proof, bool]) -> None:
        """Logs a change that live requests caused: what golden requests find is logged by model."""
        self._mark(proof)
        known = proof.summary
        if _logged_state(proof) == before:
            return
        if known.proof is Proof.REFUTED:
            log.warning(
                "worker %s: its tokens differ from the router's: %s; its overlap counts as"
                " uncertain",
                proof.worker,
                known.reason,
            )
        elif proof.doubted:
            log.warning(
                "worker %s: its tokens are not proved: %s; what was sent there counts as well",
                proof.worker,
                known.reason,
            )
        else:
            log.info("worker %s: its tokens are %s", proof.worker, known.proof.value)


def _uncertain(overlap: Overlap) -> Overlap:
    """Returns an overlap of which nothing is certain."""
    return overlap._replace(tiers=(0, 0, 0, 0), uncertain=sum(overlap.tiers) + overlap.uncertain)


def _logged_state(proof: TokenProof) -> tuple[Proof, bool]:
    """Returns what is logged when it changes."""
    return proof.summary.proof, bool(proof.doubted)


class _OfForms:
    """The trust in workers for requests of some forms, while the tokens of any worker differ."""

    def __init__(self, proofs: Proofs, forms: int) -> None:
        self._proofs = proofs
        self._forms = forms

    def overlaps(self, prompt: Prompt) -> Mapping[str, Overlap]:
        return self._proofs.overlaps(prompt, self._forms)

    def state(self, worker: str) -> str:
        return self._proofs.state(worker, self._forms)
