"""Findings of the doctor, and how they are shown as text and as JSON."""

import enum
import json
from collections.abc import Sequence
from typing import NamedTuple

from extproc.commands.layout import PLAIN, Layout, Tone
from kvstate.errors import printable
from kvtools.doctor.faults import FAULTS

# The check that says whether requests are steered now.
STEERING = "steering"

# The check that asks the running router what it finds wrong itself.
ROUTER = "router"

# Findings quote at most this many characters of what peers send, without terminal control codes.
MAX_SAID = 400

# How many names of a long list are shown.
MAX_SHOWN = 8


class Severity(enum.Enum):
    """How bad a finding is; a `NOTE` could not be checked, or could be better."""

    RIGHT = "right"
    NOTE = "note"
    WRONG = "wrong"


class Finding(NamedTuple):
    """One thing that is right or wrong.

    subject: what it is about, such as "worker 10.0.0.1:8000". check: the name of the check. code:
    one of `FAULTS`, "" if nothing is wrong. says: the finding in words. fix: what to do about it.
    """

    subject: str
    check: str
    verdict: Severity
    says: str
    code: str = ""
    fix: str = ""


class Subject(NamedTuple):
    """Makes findings about one subject."""

    subject: str

    def right(self, check: str, says: str) -> Finding:
        """Returns the finding of a check that found nothing wrong."""
        return Finding(self.subject, check, Severity.RIGHT, printable(says, MAX_SAID))

    def note(self, check: str, says: str) -> Finding:
        """Returns a note: something could not be checked, or could be better."""
        return Finding(self.subject, check, Severity.NOTE, printable(says, MAX_SAID))

    def wrong(self, code: str, says: str) -> Finding:
        """Returns a fault.

        code: one of `FAULTS`, which gives the check and the fix.
        """
        check, fix = FAULTS[code]
        return Finding(self.subject, check, Severity.WRONG, printable(says, MAX_SAID), code, fix)


def name_list(names: Sequence[str]) -> str:
    """Returns the first `MAX_SHOWN` names as text, and how many more there are."""
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return (", ".join(names[:MAX_SHOWN]) or "nothing") + more


_TONES = {Severity.WRONG: Tone.BAD, Severity.RIGHT: Tone.GOOD, Severity.NOTE: Tone.FAIR}


def as_text(findings: Sequence[Finding], layout: Layout = PLAIN) -> str:
    """Returns the findings by subject, faults first and with their fixes.

    The last line has their numbers, and whether requests are steered now.
    """
    lines: list[str] = []
    for subject in dict.fromkeys(one.subject for one in findings):
        lines.append(layout.tone(subject, Tone.STRONG))
        of_subject = [one for one in findings if one.subject == subject]
        for one in sorted(of_subject, key=_rank):
            code = f" [{one.code}]" if one.code else ""
            verdict = layout.tone(f"{one.verdict.value:5}", _TONES[one.verdict])
            lines.append(f"  {verdict}  {one.check}: {one.says}{code}")
            if one.fix:
                lines.append(f"         fix: {one.fix}")
    counts = {verdict: sum(one.verdict is verdict for one in findings) for verdict in Severity}
    numbers = (counts[Severity.WRONG], counts[Severity.RIGHT], counts[Severity.NOTE])
    notes = "note" if counts[Severity.NOTE] == 1 else "notes"
    last = "{} wrong, {} right, {} {}".format(*numbers, notes)
    worst = Severity.WRONG if exit_status(findings) else Severity.RIGHT
    return "\n".join([*lines, layout.tone("; ".join((last, *_steering(findings))), _TONES[worst])])


def as_json(findings: Sequence[Finding]) -> str:
    """Returns a JSON object: `ok`, `steering`, and the findings in the order of the text."""
    ordered = sorted(findings, key=lambda one: (_first(one, findings), _rank(one)))
    shown = [one._asdict() | {"verdict": one.verdict.value} for one in ordered]
    whole = {"ok": not exit_status(findings), "steering": "; ".join(_steering(findings))}
    return json.dumps(whole | {"findings": shown}, indent=2)


def _steering(findings: Sequence[Finding]) -> list[str]:
    """Returns whether requests are steered: what was found about it, without the reason."""
    return [one.says.partition(":")[0] for one in findings if one.check == STEERING]


def exit_status(findings: Sequence[Finding]) -> int:
    """Returns 0 when nothing is wrong, 1 otherwise."""
    return int(any(one.verdict is Severity.WRONG for one in findings))


def _first(finding: Finding, findings: Sequence[Finding]) -> int:
    """Returns the position of the first finding about the same subject."""
    return next(at for at, one in enumerate(findings) if one.subject == finding.subject)


def _rank(finding: Finding) -> int:
    """Orders faults before notes, and notes before what is right."""
    return (Severity.WRONG, Severity.NOTE, Severity.RIGHT).index(finding.verdict)
