"""What is known of whether a worker's tokens are KVSteer's: one state for each form of request.

A form of request (`extproc.requests.prompt`) is unproved, proved or refuted, for a reason and since
a moment. Three sources feed the state:

- Golden requests (`extproc.proof.golden`): the worker tokenized them. The same tokens prove a form,
  other tokens refute it, until the worker tokenizes them anew.
- Stored blocks (`extproc.proof.lookups`): by its events, the worker stored a whole prompt as it was
  tokenized here, which proves its forms; or it did not, which proves nothing, since the request may
  have been aborted. If most of the last requests were not stored, the form is doubted: unproved,
  whatever golden requests say.
- Usage (`extproc.observing.usage`): the worker counted the tokens of a prompt. Equal counts prove
  nothing, but if several of the last counts were other ones, the form is refuted.

A router that restarts remembers what was proved (`extproc.fleet.proof.proof_memory`).

A worker that loses its cache may have been restarted with other files: its forms are unproved
again, except those that golden requests refute.

    source and finding              from unproved     from proved       from refuted
    golden: the same tokens         proved *          proved            proved *
    golden: other tokens            refuted           refuted           refuted
    golden: not compared            unproved          unproved **       unproved **
    stored: the whole prompt        proved * ****     proved            refuted
    stored: not the whole prompt    unproved          doubted: unproved refuted
    usage: another count            refuted ***       refuted ***       refuted
    usage: the same count           unproved          proved            as before ***
    restart                         unproved          unproved          refuted by golden requests
    restored: proved before         proved *          proved            refuted

    *   unless it is doubted (unproved), or refuted by another source
    **  unless another source says otherwise
    *** after several of the last counts
    **** but not how a tokenizer cuts texts, which most prompts do not show

Time is an argument: seconds of one monotonic clock.
"""

from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from typing import Any, NamedTuple

from extproc.proof.recurring import RecurringCause
from extproc.proof.samples import Samples
from extproc.proof.tally import LAST_FINDINGS, Tally
from extproc.requests.prompt import (
    ALL_FORMS,
    CONVERSATION,
    CUT,
    DATE,
    DAYS,
    FORM_NAMES,
    GIVEN,
    TEXT,
    forms_to_blame,
)

# How many of them must be other counts before a form is refuted, and how many equal ones in a row
# end that: more, since only some prompts of the form may be counted otherwise.
OTHER_COUNTS = 3
EQUAL_COUNTS = 6

# How many of the last prompts must not be stored before a form is doubted, and how many stored ones
# in a row end that.
PROMPTS_NOT_STORED = 6
PROMPTS_STORED = 3

# How many of the last answered prompts a live feed must not tell of before it counts as silent; one
# that it tells of ends that.
SILENT_PROMPTS = 6
HEARD_PROMPTS = 1


class Proof(StrEnum):
    """Whether a worker's tokens are KVSteer's."""

    UNPROVED = "unproved"
    PROVED = "proved"
    REFUTED = "refuted"


# Results of live requests: stored whole as tokenized here; counted otherwise by the engine; and
# those that were not stored.
MATCHED, MISMATCHED, WITHOUT_EVIDENCE = "matched", "mismatched", "without_evidence"
FINDINGS = (MATCHED, MISMATCHED, WITHOUT_EVIDENCE)

# What is shown of a worker or model whose tokens nothing is known of, nor asked.
OFF = "off"

# All that may be shown of a model's tokens.
STATES_SHOWN = (Proof.UNPROVED.value, Proof.PROVED.value, Proof.REFUTED.value, OFF)


class Mismatch(NamedTuple):
    """The first token in which a golden request differs.

    request: its name. own, engines: the ids there; None if the tokens end before. cause: the
    likely one, in words.
    """

    request: str
    position: int
    own: int | None
    engines: int | None
    cause: str


class FormState(NamedTuple):
    """The state of a form.

    reason: in words, "" if nothing is to be said. changed_at: since when; None while it is as it
    began.
    """

    proof: Proof
    reason: str
    changed_at: float | None
    mismatch: Mismatch | None = None

    def seconds(self, now: float) -> float | None:
        """Returns how long it has lasted; None while it is as it began."""
        return None if self.changed_at is None else now - self.changed_at


class GoldenVerdict(NamedTuple):
    """What golden requests say about a form.

    is_same: None if they were not compared. reason: in words. mismatch: the first one.
    """

    is_same: bool | None
    reason: str = ""
    mismatch: Mismatch | None = None


class Comparison(NamedTuple):
    """What golden requests say about a worker's tokens.

    compared: how many were compared. forms: the verdicts on all forms that are keyed here. reason:
    one that was not compared, and the reason; "" if all were.
    """

    compared: int
    forms: dict[int, GoldenVerdict]
    reason: str = ""


# What is known before a worker has been asked, or has answered.
NOT_ASKED = "it has not answered yet"
NOT_SEEN = "no request has shown it yet"
RESTARTED = "it may have been restarted since"

NOT_STORED = (
    f"{PROMPTS_NOT_STORED} of its last {LAST_FINDINGS} requests were not stored as they are"
    " tokenized here"
)


def _counted_otherwise(ours: int, engines: int) -> str:
    return f"it counts other tokens in requests: {engines} instead of {ours} in the last such one"


class FormProof:
    """The state of one form of request at one worker. state: the state now.

    by_golden: only golden requests prove it, since few other prompts show it.
    """

    def __init__(self, *, by_golden: bool = False) -> None:
        self._by_golden = by_golden
        self.state = FormState(Proof.UNPROVED, NOT_SEEN, None)
        self._golden = GoldenVerdict(None)
        self._is_stored = self._is_restored = False
        self._unproved_why = NOT_SEEN
        self._lookups = Tally(PROMPTS_NOT_STORED, PROMPTS_STORED)
        self._counts = Tally(OTHER_COUNTS, EQUAL_COUNTS)
        self._counts_why = ""

    @property
    def is_doubted(self) -> bool:
        """Whether most of the last prompts were not stored as they are tokenized here."""
        return self._lookups.is_raised

    @property
    def is_shown(self) -> bool:
        """Whether golden requests decided."""
        return self._golden.is_same is not None

    def compare(self, verdict: GoldenVerdict, now: float) -> None:
        """Takes the verdict of golden requests.

        If they are the same after a difference, what was counted before no longer counts.
        """
        if verdict.is_same and self._golden.is_same is False:
            self._counts.clear()
        self._golden = verdict
        self._settle(now)

    def look_up(self, now: float, *, is_stored: bool) -> None:
        """Takes whether a prompt was stored whole as it is tokenized here."""
        self._lookups.add(is_good=is_stored)
        self._is_stored = self._is_stored or (is_stored and not self._by_golden)
        self._settle(now)

    def count(self, ours: int, engines: int, now: float) -> None:
        """Takes how many tokens a prompt has, here and in the engine."""
        if ours != engines:
            self._counts_why = _counted_otherwise(ours, engines)
        self._counts.add(is_good=ours == engines)
        self._settle(now)

    def restore(self, now: float) -> None:
        """Takes that it was proved before a restart of the router."""
        self._is_restored = True
        self._settle(now)

    def restart(self, now: float) -> None:
        """Takes that the worker may have been restarted with other files."""
        self._lookups.clear()
        self._counts.clear()
        self._is_stored = self._is_restored = False
        self._unproved_why = RESTARTED
        if self._golden.is_same is not False:
            self._golden = GoldenVerdict(None)
        self._settle(now)

    def _settle(self, now: float) -> None:
        proof, why, mismatch = self._concluded()
        at = self.state.changed_at if proof is self.state.proof else now
        self.state = FormState(proof, why, at, mismatch)

    def _concluded(self) -> tuple[Proof, str, Mismatch | None]:
        golden = self._golden
        if golden.is_same is False:
            return Proof.REFUTED, golden.reason, golden.mismatch
        if self._counts.is_raised:
            return Proof.REFUTED, self._counts_why, None
        if self._lookups.is_raised:
            return Proof.UNPROVED, NOT_STORED, None
        if golden.is_same or self._is_stored or self._is_restored:
            return Proof.PROVED, "", None
        return Proof.UNPROVED, golden.reason or self._unproved_why, None


class TokenProof:
    """The state of one worker's tokens, by form.

    worker: its name. compared: how many golden requests were compared; is_asked: whether any are.
    reason: one that was not, and the reason. findings: those of live requests, by result. refuted,
    doubted, proved: the forms that are; differing: the refuted ones whose ids the engine makes
    itself, so not GIVEN: where that is refuted, only ids that come along are not taken. feed_tally:
    whether its feed told of the last prompts that it answered. predictions: how those for it came
    out. samples: of requests to it that would get the ids of their prompts.
    """

    def __init__(self, worker: str = "") -> None:
        self.worker = worker
        self._model: str | None = None
        self.compared = 0
        self.is_asked = False
        self.reason = ""
        self.findings = Counter(dict.fromkeys(FINDINGS, 0))
        self.refuted = self.differing = self.doubted = self.proved = 0
        self.feed_tally = Tally(SILENT_PROMPTS, HEARD_PROMPTS)
        self.predictions = RecurringCause()
        self.samples = Samples()
        self._keyed = ALL_FORMS
        self._forms = {form: _unproved(form) for form in FORM_NAMES}

    @property
    def is_silent(self) -> bool:
        """Whether its feed tells nothing of the prompts that it answers, so that it shows nothing.

        This lasts through a restart of the worker: what hides its events may be in between.
        """
        return self.feed_tally.is_raised

    @property
    def is_disbelieved(self) -> bool:
        """Whether all that its feed shows is uncertain."""
        return self.feed_tally.is_raised or self.predictions.lowers

    def agrees(self, comparison: Comparison) -> bool:
        """Returns whether a result of golden requests refutes nothing that is not refuted yet."""
        refuting = (form for form, one in comparison.forms.items() if one.is_same is False)
        return all(
            self.state_of(form).mismatch == comparison.forms[form].mismatch for form in refuting
        )

    def serve(self, model: str) -> None:
        """Takes which model the worker serves: what was known of another one is forgotten."""
        if self._model not in (None, model):
            self.__init__(self.worker)  # type: ignore[misc]
        self._model = model

    def expect(self) -> None:
        """Notes that golden requests will be compared."""
        self.is_asked = True
        self.reason = self.reason or NOT_ASKED

    def compare(self, comparison: Comparison, now: float) -> None:
        """Takes the result of golden requests."""
        self.compared, self.reason = comparison.compared, comparison.reason
        self._keyed = sum(comparison.forms)
        for form, proof in self._forms.items():
            proof.compare(comparison.forms.get(form, GoldenVerdict(None)), now)
        self._note()

    def uncompared(self, why: str, now: float, *, for_now: bool) -> None:
        """Takes why golden requests were not compared.

        for_now: the worker only did not answer; what it answered before then remains, but for the
            date of its start, which may have become another one than today's.
        """
        if not for_now:
            self.compare(
                Comparison(0, dict.fromkeys(FORM_NAMES, GoldenVerdict(None, why)), why), now
            )
        else:
            self.forget(DAYS)
            self.reason = self.reason if self.compared else why

    def look_up(self, forms: int, now: float, *, is_stored: bool) -> None:
        """Takes whether the prompt of a request of these forms was stored whole."""
        self.findings[MATCHED if is_stored else WITHOUT_EVIDENCE] += 1
        for form in _each(forms if is_stored else forms_to_blame(forms)):
            self._forms[form].look_up(now, is_stored=is_stored)
        self._note()

    def count(self, forms: int, ours: int, engines: int, now: float) -> None:
        """Takes how many tokens the prompt of a request of these forms has, here and there."""
        if ours != engines:
            self.findings[MISMATCHED] += 1
        for form in _each(forms_to_blame(forms)):
            self._forms[form].count(ours, engines, now)
        self._note()

    def restore(self, forms: int, now: float) -> None:
        """Takes which forms were proved before a restart of the router, maybe on another day."""
        for form in _each(forms & ~DAYS):
            self._forms[form].restore(now)
        self._note()

    def restart(self, now: float) -> None:
        """Takes that the worker may have been restarted with other files."""
        self.predictions.clear()
        self.samples.restart()
        for proof in self._forms.values():
            proof.restart(now)
        self._note()

    def forget(self, forms: int) -> None:
        """Takes that nothing is known of some forms any more.

        What samples refuted remains: the worker did not start anew.
        """
        self.samples.begin_anew()
        for form in _each(forms):
            self._forms[form] = _unproved(form)
        self._note()

    def state_of(self, form: int) -> FormState:
        """Returns the state of one form."""
        return self._forms[form].state

    def is_shown(self, form: int) -> bool:
        """Returns whether golden requests decided on one form."""
        return self._forms[form].is_shown

    def is_proved(self, forms: int) -> bool:
        """Returns whether all of some forms are proved."""
        return self.proved & forms == forms

    @property
    def summary(self) -> FormState:
        """The state of all forms in one: a refuted form, else a doubted one, else conversations.

        If no conversation is keyed here, texts count instead of conversations.
        """
        for marked in (self.differing, self.doubted):
            if marked:
                return self.state_of(next(_each(marked)))
        known = self.state_of(CONVERSATION if self._keyed & CONVERSATION else TEXT)
        return (
            known
            if known.proof is Proof.PROVED
            else known._replace(reason=self.reason or known.reason)
        )

    @property
    def state_text(self) -> str:
        """One of `STATES_SHOWN`: OFF if nothing is known, and no golden request is compared."""
        proof = self.summary.proof
        is_known = self.is_asked or self.doubted or proof is not Proof.UNPROVED
        return proof.value if is_known else OFF

    def as_json(self, now: float) -> dict[str, Any]:
        """Returns its fields for GET /workers and GET /models."""
        known = self.summary
        found = known.mismatch
        return {
            "state": self.state_text,
            "why": self.reason if known.proof is Proof.PROVED else known.reason,
            "seconds": known.seconds(now),
            "compared": self.compared,
            **self.findings,
            "doubted": bool(self.doubted),
            "forms": {
                name: {"state": one.proof.value, "why": one.reason, "seconds": one.seconds(now)}
                for form, name in FORM_NAMES.items()
                for one in (self.state_of(form),)
            },
            "request": found and found.request,
            "position": found and found.position,
            "ours": found and found.own,
            "engine": found and found.engines,
            "cause": found and found.cause,
        }

    def _note(self) -> None:
        self.refuted = self.doubted = self.proved = 0
        for form, one in self._forms.items():
            if one.state.proof is Proof.PROVED and form != DATE:
                self.proved |= form  # what a worker wrote says nothing of the date that it writes
            if one.state.proof is Proof.REFUTED:
                self.refuted |= form
            elif one.is_doubted:
                self.doubted |= form
        self.differing = self.refuted & ~GIVEN


def _unproved(form: int) -> FormProof:
    return FormProof(by_golden=bool(form & (CUT | DAYS)))


def _each(forms: int) -> Iterator[int]:
    return (form for form in FORM_NAMES if form & forms)
