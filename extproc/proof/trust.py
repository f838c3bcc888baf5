"""Feeds the state of workers' tokens from live requests, and lowers credit where they differ.

This folder asks one question: are the token ids that are computed here those of the engine? Golden
requests ask it at the start (`golden`, `golden_forms`), stored blocks and usage answer it for live
requests (`lookups`, `recurring`), and `state` has the table of what each answer proves, by form.

It may know prompts, forms, and what workers hold. It decides nothing about requests: it turns
overlaps into certain or uncertain ones, and the decision weighs those.

The rule: what is not proved is uncertain, and what is refuted counts for nothing, whatever else
speaks for it.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol
from weakref import WeakSet

from extproc.base.fault import Fault
from extproc.proof.lookups import (
    SILENCE_SECONDS,
    Lookups,
    SentRequest,
    has_published,
    held_tokens,
    is_stored,
    may_show,
)
from extproc.proof.state import SILENT_PROMPTS, Comparison, Proof, TokenProof
from extproc.proof.tally import LAST_FINDINGS
from extproc.requests.prompt import AGREED_FORMS, BY_RELEASE, PRINTED
from kvstate.feeds.feed import FeedState
from kvstate.fleet import FollowedWorkers
from kvstate.overlap import Overlap, Prompt

log = logging.getLogger("kvsteer.tokens")

# The states of a worker whose feed is complete, but whose tokens are refuted or doubted.
DIFFERS, DOUBTED = "differs", "doubted"

# The state of a worker whose feed is complete, and tells nothing of what the worker computes.
SILENT = "silent"

# The state of a worker whose feed is complete, but whose answers contradict it.
CONTRADICTED = "contradicted"

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

    @property
    def must_tell(self) -> bool:
        """Whether its feed has to tell of what it computes: it answers, and caches prefixes."""


class Trust(Protocol):
    """What workers are trusted to hold for one request."""

    def overlaps(self, prompt: Prompt) -> Mapping[str, Overlap]:
        """Returns what each worker holds of a prompt: nothing certain if its tokens are refuted."""

    def state(self, worker: str) -> str:
        """Returns the state of a worker's feeds; another one if its tokens are not trusted."""


def _any_size(_: str) -> int:
    return 1


class Proofs:
    """The state of all workers' tokens, and whether their feeds tell of what they compute.

    records: of the workers, by name. monotonic: returns seconds. block_size: returns the tokens in
    a worker's block, as far as that is known before its feed tells it. wants_answers: whether
    answers have to be seen, since a feed told nothing of a request that may have had none.
    """

    def __init__(
        self,
        fleet: FollowedWorkers,
        records: Mapping[str, HasProof],
        monotonic: Callable[[], float] = time.monotonic,
        block_size: Callable[[str], int] = _any_size,
    ) -> None:
        self._block_size = block_size
        self._blocks = fleet.blocks
        self._feeds = fleet.feeds
        self._records = records
        self._monotonic = monotonic
        # weak: a proof ends with the record that it is part of
        # refuted or doubted for some forms, or with a silent feed
        self._distrusted: WeakSet[TokenProof] = WeakSet()
        self._watchers: list[Callable[[str], None]] = []
        # also if all of them have ended: a WeakSet's length takes longer than all else here
        self._has_distrusted = False
        self._unheard: WeakSet[TokenProof] = WeakSet()
        self.wants_answers = False

    def watch(self, reconsider: Callable[[str], None]) -> None:
        """Has this called with the name of a worker whose tools are not printed as assumed here."""
        self._watchers.append(reconsider)

    def note_sent(
        self,
        worker: str,
        prompt: Prompt,
        forms: int,
        overlap: Overlap | None,
        *,
        is_sample: bool = False,
    ) -> SentRequest | None:
        """Notes a request sent to a worker; returns it if it will be looked up, else None.

        prompt: tokenized here. forms: of the request. overlap: what the worker holds of the prompt.
        is_sample: whether it is one of few that go without their ids, so that it does not wait for
        its turn. The caller passes the request to `ended` when it is over, or to `dropped`.
        """
        clock = self._monotonic
        record, now = self._records.get(worker), clock()
        # most requests end here, for less than a microsecond
        if record is None:
            return None
        is_proved = record.proof.is_proved(forms) and not record.proof.feed_tally.has_bad
        if not (is_sample or record.lookups.is_open(now, is_proved=is_proved)):
            return None
        self._look_up_due(worker, record, now)
        return self._kept(worker, record, prompt, forms, overlap)

    def note_golden(self, worker: str, prompt: Prompt, forms: int) -> SentRequest | None:
        """Notes a golden request that will be sent to a worker, as `note_sent` does for others."""
        record = self._records.get(worker)
        if record is None:
            return None
        overlap = self._blocks.overlaps(prompt).get(worker)
        return self._kept(worker, record, prompt, forms, overlap)

    def _kept(
        self, worker: str, record: HasProof, prompt: Prompt, forms: int, overlap: Overlap | None
    ) -> SentRequest | None:
        """Has a request wait until it is looked up; returns it, None if it will not be."""
        now = self._monotonic()
        is_proved = record.proof.is_proved(forms) and not record.proof.feed_tally.has_bad
        if not record.lookups.has_room(now) or not self._must_tell(worker):
            return None
        if not may_show(prompt, overlap, self._block_size(worker), is_proved=is_proved):
            return None
        lookups, held = record.lookups, held_tokens(overlap)
        size, slot = self._blocks.block_size(worker), lookups.free_slot()
        is_watched = size is not None and self._blocks.watch(worker, slot, prompt, size)
        sent = SentRequest(
            prompt,
            forms,
            held,
            self._feeds.batches(worker),
            now,
            slot=slot,
            block_size=size if is_watched else None,
            live_batches=self._feeds.live_batches(worker),
        )
        record.lookups.add(sent, is_proved=is_proved)
        return sent

    def answered(self, sent: SentRequest) -> None:
        """Notes that a request is answered by its worker, without a failure."""
        sent.is_answered = True

    def look_up(self, worker: str) -> None:
        """Looks up one request of a worker that is over, if any is due."""
        record = self._records.get(worker)
        if record is not None:
            self._look_up_due(worker, record, self._monotonic())

    def block_size(self, worker: str) -> int | None:
        """Returns the tokens in a worker's block, None if that is not known."""
        return self._blocks.block_size(worker)

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

    def predicted(self, worker: str, cause: str) -> None:
        """Notes how a prediction came out. cause: why it was wrong, "" if it was right."""
        record = self._records.get(worker)
        if record is None:
            return
        predictions = record.proof.predictions
        before = predictions.cause
        predictions.note(cause, self._monotonic())
        if predictions.cause != before:
            self._mark(record.proof)

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

    def note_engine(self, record: HasProof) -> None:
        """Notes that a worker's engine is another one, or became known."""
        record.proof.forget(BY_RELEASE)
        self._mark(record.proof)

    def note_printing(self, record: HasProof) -> None:
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
        or not proved where releases differ, or whose feed is silent or contradicted.

        Those of doubted tokens stay certain: the worker holds these blocks, whatever it will store.
        """
        found = self._blocks.overlaps(prompt)
        if forms & BY_RELEASE:
            return {
                name: overlap if self.is_certain(name, forms) else _uncertain(overlap)
                for name, overlap in found.items()
            }
        for proof in self._distrusted if self._has_distrusted else ():
            overlap = found.get(proof.worker)
            is_wrong = proof.is_disbelieved or proof.refuted & forms
            if overlap is not None and is_wrong and self._is_current(proof):
                found[proof.worker] = _uncertain(overlap)
        return found

    def is_certain(self, worker: str, forms: int) -> bool:
        """Returns whether what a worker holds of a request of these forms may be certain."""
        record = self._records.get(worker)
        if record is None or record.proof.is_disbelieved:
            return False
        return not record.proof.refuted & forms and record.proof.is_proved(forms & BY_RELEASE)

    def has_proved(self, worker: str, forms: int) -> bool:
        """Returns whether a worker's tokens of these forms are proved, and nothing speaks against
        its feed.
        """
        record = self._records.get(worker)
        if record is None or record.proof.is_disbelieved:
            return False
        return record.proof.is_proved(forms)

    def state(self, worker: str, forms: int = AGREED_FORMS) -> str:
        """Returns the fleet's state; SILENT or CONTRADICTED if its feed is, and DIFFERS, DOUBTED or
        UNPROVED if these forms are, so that what was sent to the worker counts as well.
        """
        state = self._feeds.state(worker)
        by_release = forms & BY_RELEASE
        is_trusted = state is not FeedState.LIVE or not (self._has_distrusted or by_release)
        record = None if is_trusted else self._records.get(worker)
        if record is None:
            return state.value
        if record.proof.is_disbelieved:
            return SILENT if record.proof.is_silent else CONTRADICTED
        if record.proof.refuted & forms:
            return DIFFERS
        if not record.proof.is_proved(by_release):
            return UNPROVED
        return DOUBTED if record.proof.doubted & forms else state.value

    def is_live(self, worker: str, forms: int) -> bool:
        """Returns whether a worker's feed is complete, and its tokens of these forms trusted."""
        if self._has_distrusted or forms & BY_RELEASE:
            return self.state(worker, forms) == _LIVE
        return self._feeds.state(worker) is _LIVE

    def silence(self, worker: str) -> str:
        """Returns in words how a worker's live feed tells nothing, "" if it tells."""
        record = self._records.get(worker)
        if record is None or not record.proof.is_silent or not record.must_tell:
            return ""
        if not self._must_tell(worker):
            return ""
        of_last = f"{SILENT_PROMPTS} of the last {LAST_FINDINGS} prompts that the worker answered"
        if self._blocks.block_size(worker) is not None or not self._feeds.batches(worker):
            return f"the feed is connected and told nothing of {of_last}"
        if self._lacks_prefixes(worker):
            return "this model announces no full-attention blocks"
        return f"nothing that the feed told of {of_last} could be used"

    def disbelief(self, worker: str) -> tuple[str, str]:
        """Returns the state of a worker if its feed shows nothing certain, and why."""
        why, record = self.silence(worker), self._records.get(worker)
        if why or record is None or not record.proof.predictions.lowers:
            return SILENT if why else "", why
        if self._feeds.state(worker) is not FeedState.LIVE:
            return "", ""
        return CONTRADICTED, record.proof.predictions.in_words

    def faults(self) -> Iterator[Fault]:
        """Yields a fault for each worker whose feed is silent, or predicts wrongly, or that gets no
        token ids any more.
        """
        for name, record in self._records.items():
            refuted = record.proof.samples.refuted
            if refuted:
                says = f"token ids no longer go with requests: {refuted}"
                yield Fault("handover-refuted", f"worker {name}", says)
        for proof in sorted(self._distrusted, key=_name_of) if self._has_distrusted else ():
            why = self.silence(proof.worker) if self._is_current(proof) else ""
            if why and not self._feeds.is_unsequenced(proof.worker):  # a fault of its own
                is_other = self._lacks_prefixes(proof.worker)
                code = "no-full-attention" if is_other else "feed-silent"
                yield Fault(code, f"worker {proof.worker}", why)
            if not why and proof.predictions.cause and self._is_current(proof):
                says = proof.predictions.in_words
                yield Fault("predictions-wrong", f"worker {proof.worker}", says)

    def differs(self, worker: str) -> bool:
        """Returns whether a worker makes other tokens for any form."""
        record = self._records.get(worker)
        return record is not None and bool(record.proof.differing)

    def status(self, worker: str) -> dict[str, Any]:
        """Returns the state of a worker's tokens, as GET /workers shows it."""
        record, now = self._records.get(worker), self._monotonic()
        if record is None:
            return TokenProof(worker).as_json(now)
        self._look_up_due(worker, record, now)
        shown = record.proof.as_json(now)
        samples = record.proof.samples
        return {**shown, "samples": samples.as_json()} if samples.results else shown

    def _look_up_due(self, worker: str, record: HasProof, now: float) -> None:
        """Looks up one request that is over: a step of bounded length, once or twice a second."""
        sent = record.lookups.take_due(now)
        if sent is None or not self._must_tell(worker):
            return
        overlap, found = self._blocks.overlaps(sent.prompt).get(worker), None
        if self._feeds.state(worker) is FeedState.LIVE and not sent.is_shown:
            batches, size = self._feeds.batches(worker), self._blocks.block_size(worker)
            was_stored = self._was_stored(worker, sent, size)
            found = is_stored(sent, overlap, batches, size, now, was_stored=was_stored)
        self._hear(worker, record, sent, now)
        if found is not None:
            sent.is_shown = True
            before = _logged_state(record.proof)
            record.proof.look_up(sent.forms, now, is_stored=found)
            self._note(record.proof, before)
            self._reconsider(worker, record)

    def _must_tell(self, worker: str) -> bool:
        """Whether a worker's feed has to tell of each prompt that it did not tell of before.

        After a hole the worker may hold prompts that the feed tells nothing of; but then it is
        strange that it has never told anything.
        """
        state = self._feeds.state(worker)
        if state is FeedState.DEGRADED:
            return self._blocks.block_size(worker) is None
        return state is FeedState.LIVE

    def _lacks_prefixes(self, worker: str) -> bool:
        """Whether all that a worker's feed ever told is of windows or states, not of prefixes."""
        has_no_size = self._blocks.block_size(worker) is None
        return has_no_size and self._blocks.other_groups(worker).are_there

    def _hear(self, worker: str, record: HasProof, sent: SentRequest, now: float) -> None:
        """Notes whether a worker's feed told of a request that is over.

        What only a replay brought, the feed did not tell.
        """
        proof = record.proof
        is_read, size = self._blocks.block_size(worker) is not None, self._block_size(worker)
        heard = has_published(sent, self._feeds.live_batches(worker), size, is_read=is_read)
        if heard is not True and self._lacks_prefixes(worker):
            proof.feed_tally.alarm()
            self._mark(proof)
            return
        if heard is False and not sent.is_over(now, SILENCE_SECONDS):
            record.lookups.put_back(sent)
            return
        if heard is None and not proof.is_silent:
            self._unheard.add(proof)
        elif heard:
            self._unheard.discard(proof)
        self.wants_answers = bool(self._unheard)
        if heard or (heard is False and record.must_tell and self._feeds.is_certain(worker)):
            proof.feed_tally.add(is_good=heard)
            self._mark(proof)

    def _was_stored(self, worker: str, sent: SentRequest, size: int | None) -> bool | None:
        """Returns whether the last block of a prompt was stored since; None if it is not known.

        Before a worker's first store, nothing can be watched for: then what is not held was not
        stored, as long as nothing was removed.
        """
        if sent.block_size == size:
            return self._blocks.was_stored(worker, sent.slot)
        is_first = sent.block_size is None and not self._blocks.has_removed(worker)
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
        if proof.refuted or proof.doubted or proof.is_silent or proof.predictions.cause:
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


def _name_of(proof: TokenProof) -> str:
    return proof.worker


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
