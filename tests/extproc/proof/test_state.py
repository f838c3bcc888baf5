"""What is known of a worker's tokens after any findings, compared with a retelling of them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.proof.samples import DISAGREED
from extproc.proof.state import (
    EQUAL_COUNTS,
    NOT_STORED,
    OTHER_COUNTS,
    PROMPTS_NOT_STORED,
    PROMPTS_STORED,
    Comparison,
    GoldenVerdict,
    Mismatch,
    Proof,
    TokenProof,
)
from extproc.proof.tally import LAST_FINDINGS
from extproc.requests.prompt import (
    ALL_FORMS,
    BY_RELEASE,
    CONVERSATION,
    CUT,
    EFFORT,
    FORM_NAMES,
    GIVEN,
    PRINTED,
    REASONING,
    TOOLS,
    forms_to_blame,
)

DIFFERENT = GoldenVerdict(
    is_same=False, reason="they differ", mismatch=Mismatch("a text", 3, 1, 2, "another tokenizer")
)
SAME, UNTOLD = GoldenVerdict(is_same=True), GoldenVerdict(None, "status 400")
OF_REQUESTS = (
    CONVERSATION,
    CONVERSATION | TOOLS | CUT,
    CONVERSATION | TOOLS | REASONING | EFFORT,
)


class Finding(NamedTuple):
    """A finding about a request of these forms. kind: which; of golden requests, the verdicts."""

    kind: str
    forms: int = ALL_FORMS
    verdicts: tuple[GoldenVerdict, ...] = ()


LIVE = [
    Finding(kind, forms)
    for kind in ("stored", "not stored", "same count", "other count")
    for forms in OF_REQUESTS
]
VERDICTS = st.tuples(*(st.sampled_from([SAME, UNTOLD, DIFFERENT]) for _ in FORM_NAMES))
GOLDEN = VERDICTS.map(lambda verdicts: Finding("golden", ALL_FORMS, verdicts))
ALL_SAME = Finding("golden", ALL_FORMS, (SAME,) * len(FORM_NAMES))
ANY = st.one_of(st.sampled_from(LIVE), st.sampled_from([ALL_SAME, Finding("restart")]), GOLDEN)
# runs of one finding, or nothing would ever be refuted by counts
RUNS = st.lists(st.tuples(ANY, st.integers(1, LAST_FINDINGS)), max_size=12)
FINDINGS = RUNS.map(lambda runs: [one for one, times in runs for _ in range(times)])
UNEVIDENT = RUNS.map(
    lambda runs: [one for one, times in runs for _ in range(times) if not refutes(one)]
)


def refutes(finding: Finding) -> bool:
    return finding.kind == "other count" or DIFFERENT in finding.verdicts


def take(proof: TokenProof, finding: Finding, now: float) -> None:
    kind, forms, verdicts = finding
    if kind == "golden":
        proof.compare(Comparison(3, dict(zip(FORM_NAMES, verdicts, strict=True))), now)
    elif kind == "restart":
        proof.restart(now)
    elif kind.endswith("stored"):
        proof.look_up(forms, now, is_stored=kind == "stored")
    else:
        proof.count(forms, 10, 10 if kind == "same count" else 11, now)


def after(findings: Sequence[Finding]) -> TokenProof:
    proof = TokenProof("w")
    for number, finding in enumerate(findings):
        take(proof, finding, float(number))
    return proof


def raised(goods: Sequence[bool], bad: int, good: int) -> bool:
    """Whether so many of the last were bad, and not so many good ones in a row came since."""
    begun, start = False, 0
    for end in range(1, len(goods) + 1):
        last = goods[start:end][-LAST_FINDINGS:]
        if not begun:
            begun = last.count(False) >= bad
        elif len(last) >= good and all(last[-good:]):
            begun, start = False, end
    return begun


def touches(finding: Finding, form: int) -> bool:
    """Whether a finding is about a form: only a stored prompt says anything about all of its."""
    forms = finding.forms if finding.kind in ("stored", "golden", "restart") else None
    return bool((forms_to_blame(finding.forms) if forms is None else forms) & form)


def retold(findings: Sequence[Finding], form: int) -> Proof:
    """The state of one form, told from all findings at once."""
    at = list(FORM_NAMES).index(form)
    about = [one for one in findings if touches(one, form)]
    since = list(after_last(about, lambda one: one.kind == "restart"))
    results = [one.verdicts[at].is_same for one in about if one.kind == "golden"]
    told_since = [one.verdicts[at].is_same for one in since if one.kind == "golden"]
    golden = told_since[-1] if told_since else (False if results and results[-1] is False else None)
    mended = counted_since_mended(about, at)
    counts = [one.kind == "same count" for one in mended if one.kind.endswith("count")]
    stores = [one.kind == "stored" for one in since if one.kind.endswith("stored")]
    if golden is False or raised(counts, OTHER_COUNTS, EQUAL_COUNTS):
        return Proof.REFUTED
    if raised(stores, PROMPTS_NOT_STORED, PROMPTS_STORED):
        return Proof.UNPROVED
    doubts = [n for n in range(1, len(stores) + 1) if doubted(stores[:n])]
    is_stored = form != CUT and True in stores[doubts[-1] if doubts else 0 :]
    return Proof.PROVED if golden or is_stored else Proof.UNPROVED


def doubted(stores: Sequence[bool]) -> bool:
    return raised(stores, PROMPTS_NOT_STORED, PROMPTS_STORED)


def after_last(findings: Sequence[Finding], is_it: Callable[[Finding], bool]) -> Sequence[Finding]:
    numbers = [number for number, one in enumerate(findings) if is_it(one)]
    return findings[numbers[-1] + 1 :] if numbers else findings


def counted_since_mended(about: Sequence[Finding], at: int) -> Sequence[Finding]:
    """What came after the last restart, or after golden requests became the same again."""
    begin, last = 0, None
    for number, one in enumerate(about):
        if one.kind == "golden":
            if one.verdicts[at].is_same and last is False:
                begin = number
            last = one.verdicts[at].is_same
        elif one.kind == "restart":
            begin, last = number, (False if last is False else None)
    return about[begin:]


@settings(max_examples=4 * settings().max_examples)
@given(FINDINGS)
def test_state_is_what_the_findings_since_the_last_restart_say(findings: list[Finding]) -> None:
    proof = after(findings)
    for form in FORM_NAMES:
        assert proof.state_of(form).proof is retold(findings, form), FORM_NAMES[form]


@given(UNEVIDENT)
def test_state_is_never_refuted_without_other_tokens_or_counts(findings: list[Finding]) -> None:
    assert after(findings).refuted == 0


@given(FINDINGS)
def test_state_is_never_proved_without_the_same_tokens_or_stored_blocks(
    findings: list[Finding],
) -> None:
    results = [one for one in findings if one.kind != "stored" and SAME not in one.verdicts]
    proof = after(results)
    assert all(proof.state_of(form).proof is not Proof.PROVED for form in FORM_NAMES)


@given(FINDINGS, ANY)
def test_finding_changes_no_state_of_a_form_that_it_is_not_about(
    findings: list[Finding], last: Finding
) -> None:
    before, proof = after(findings), after([*findings, last])
    for form in FORM_NAMES:
        if not touches(last, form):
            assert proof.state_of(form) == before.state_of(form)


@given(FINDINGS, ANY)
def test_moment_is_that_of_the_last_change(findings: list[Finding], last: Finding) -> None:
    before, proof, now = after(findings), after([*findings, last]), float(len(findings))
    for form in FORM_NAMES:
        is_changed = proof.state_of(form).proof is not before.state_of(form).proof
        assert proof.state_of(form).changed_at == (
            now if is_changed else before.state_of(form).changed_at
        )


@given(FINDINGS)
def test_refuted_forms_have_a_reason_and_so_have_unproved_ones(findings: list[Finding]) -> None:
    proof = after(findings)
    for form in FORM_NAMES:
        known = proof.state_of(form)
        assert (
            bool(known.reason) is (known.proof is not Proof.PROVED) or UNTOLD.reason == known.reason
        )


U, P, R = Proof.UNPROVED, Proof.PROVED, Proof.REFUTED
BEGINNINGS = {
    U: [],
    P: [Finding("golden", ALL_FORMS, (SAME,) * len(FORM_NAMES))],
    R: [Finding("golden", ALL_FORMS, (DIFFERENT,) * len(FORM_NAMES))],
}
TABLE = [  # as in the docstring of the module: after one finding, and after many
    ("golden", SAME, (P, P, P), (P, P, P)),
    ("golden", DIFFERENT, (R, R, R), (R, R, R)),
    ("golden", UNTOLD, (U, U, U), (U, U, U)),
    ("stored", None, (P, P, R), (P, P, R)),
    ("not stored", None, (U, P, R), (U, U, R)),
    ("other count", None, (U, P, R), (R, R, R)),
    ("same count", None, (U, P, R), (U, P, R)),
    ("restart", None, (U, U, R), (U, U, R)),
]


@pytest.mark.parametrize(("kind", "verdict", "once", "often"), TABLE)
def test_state_follows_the_table(
    kind: str, verdict: GoldenVerdict | None, once: tuple[Proof, ...], often: tuple[Proof, ...]
) -> None:
    finding = Finding(kind, CONVERSATION, (verdict,) * len(FORM_NAMES) if verdict else ())
    for begin, one, many in zip((U, P, R), once, often, strict=True):
        assert after([*BEGINNINGS[begin], finding]).state_of(CONVERSATION).proof is one
        repeated = [*BEGINNINGS[begin], *[finding] * LAST_FINDINGS]
        assert after(repeated).state_of(CONVERSATION).proof is many


def test_doubt_is_named_and_outweighs_golden_requests_until_prompts_are_stored() -> None:
    missed = [Finding("not stored", CONVERSATION)] * PROMPTS_NOT_STORED
    proof = after([*BEGINNINGS[P], *missed, *BEGINNINGS[P]])
    assert (proof.summary.proof, proof.summary.reason) == (U, NOT_STORED)
    assert (proof.doubted, proof.refuted) == (CONVERSATION, 0)
    stored = [Finding("stored", CONVERSATION)] * PROMPTS_STORED
    assert after([*BEGINNINGS[P], *missed, *stored]).summary.proof is P


def test_golden_requests_that_are_not_compared_leave_what_was_compared() -> None:
    proof = TokenProof("w")
    proof.uncompared("no answer", 0.0, for_now=True)
    assert (proof.reason, proof.summary.proof) == ("no answer", Proof.UNPROVED)
    assert not proof.is_shown(TOOLS)
    proof.compare(Comparison(3, dict.fromkeys(FORM_NAMES, SAME)), 1.0)
    proof.uncompared("no answer", 2.0, for_now=True)
    assert (proof.reason, proof.summary.proof) == ("", Proof.PROVED)
    assert proof.is_shown(TOOLS)
    proof.uncompared("status 404", 3.0, for_now=False)
    assert (proof.reason, proof.summary.proof) == ("status 404", Proof.UNPROVED)


@pytest.mark.parametrize("ends", ["does not answer", "has another release", "prints otherwise"])
def test_only_a_restart_lifts_what_samples_refuted(ends: str) -> None:
    proof = TokenProof("w")
    proof.samples.note_result(DISAGREED, ("chats",), 4, 0, "it counted 3")
    if ends == "does not answer":
        proof.uncompared("no answer", 1.0, for_now=True)
    else:
        proof.forget(BY_RELEASE if ends == "has another release" else PRINTED)
    assert proof.samples.refuted
    proof.restart(2.0)
    assert not proof.samples.refuted


def test_engine_that_takes_no_ids_makes_the_same_tokens_itself() -> None:
    forms = dict.fromkeys(FORM_NAMES, SAME) | {GIVEN: DIFFERENT}
    proof = TokenProof("w")
    proof.compare(Comparison(3, forms), 0.0)
    assert (proof.refuted, proof.differing, proof.state_text) == (GIVEN, 0, "proved")
    proof.compare(Comparison(3, forms | {TOOLS: DIFFERENT}), 1.0)
    assert (proof.refuted, proof.differing, proof.state_text) == (GIVEN | TOOLS, TOOLS, "refuted")


def test_other_model_begins_anew() -> None:
    proof = after(BEGINNINGS[R])
    proof.serve("a")
    assert proof.refuted == ALL_FORMS
    proof.serve("b")
    assert (proof.refuted, proof.worker, proof.state_text) == (0, "w", "off")
    proof.expect()
    assert proof.state_text == "unproved"
    assert proof.as_json(9.0)["seconds"] is None
