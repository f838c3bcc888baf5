"""What the doctor found, and how it is told: as text for people, as JSON for programs."""

import enum
import json
from collections.abc import Sequence
from typing import NamedTuple

from extproc.doctor.faults import FAULTS
from kvstate.errors import printable

# What peers say is repeated so far, and without what would move a terminal's cursor.
MAX_SAID = 400

# Of many names so many are shown.
MAX_SHOWN = 8


class Verdict(enum.Enum):
    """How bad a finding is; `NOTE` is what could not be told, or could be better."""

    RIGHT = "right"
    NOTE = "note"
    WRONG = "wrong"


class Finding(NamedTuple):
    """One thing that is right or wrong.

    subject: what it is about, such as "worker 10.0.0.1:8000". check: the name of the check. code:
    one of `FAULTS`, "" where nothing is wrong. says: in plain words. fix: what to do.
    """

    subject: str
    check: str
    verdict: Verdict
    says: str
    code: str = ""
    fix: str = ""


class About(NamedTuple):
    """Makes findings about one subject."""

    subject: str

    def right(self, check: str, says: str) -> Finding:
        """A check that found nothing wrong."""
        return Finding(self.subject, check, Verdict.RIGHT, printable(says, MAX_SAID))

    def note(self, check: str, says: str) -> Finding:
        """Something that could not be checked, or is no fault."""
        return Finding(self.subject, check, Verdict.NOTE, printable(says, MAX_SAID))

    def wrong(self, code: str, says: str) -> Finding:
        """A fault.

        code: one of `FAULTS`, which has its check and its fix.
        """
        check, fix = FAULTS[code]
        return Finding(self.subject, check, Verdict.WRONG, printable(says, MAX_SAID), code, fix)


def shown(names: Sequence[str]) -> str:
    """Some names, the first few of many."""
    more = f" and {len(names) - MAX_SHOWN} more" if len(names) > MAX_SHOWN else ""
    return (", ".join(names[:MAX_SHOWN]) or "nothing") + more


def exit_status(findings: Sequence[Finding]) -> int:
    """0 when nothing is wrong, 1 otherwise."""
    return int(any(one.verdict is Verdict.WRONG for one in findings))


def as_text(findings: Sequence[Finding]) -> str:
    """The findings by subject, faults with their fixes, and a line that counts them."""
    lines: list[str] = []
    for subject in dict.fromkeys(one.subject for one in findings):
        lines.append(subject)
        of_subject = [one for one in findings if one.subject == subject]
        for one in sorted(of_subject, key=_rank):
            code = f" [{one.code}]" if one.code else ""
            lines.append(f"  {one.verdict.value:5}  {one.check}: {one.says}{code}")
            if one.fix:
                lines.append(f"         fix: {one.fix}")
    counts = {verdict: sum(one.verdict is verdict for one in findings) for verdict in Verdict}
    told = (counts[Verdict.WRONG], counts[Verdict.RIGHT], counts[Verdict.NOTE])
    notes = "note" if counts[Verdict.NOTE] == 1 else "notes"
    return "\n".join([*lines, "{} wrong, {} right, {} {}".format(*told, notes)])


def as_json(findings: Sequence[Finding]) -> str:
    """An object with the findings in the order of the text, and whether all is right."""
    ordered = sorted(findings, key=lambda one: (_first(one, findings), _rank(one)))
    shown = [one._asdict() | {"verdict": one.verdict.value} for one in ordered]
    return json.dumps({"ok": not exit_status(findings), "findings": shown}, indent=2)


def _first(finding: Finding, findings: Sequence[Finding]) -> int:
    """Where the subject of a finding is named first."""
    return next(at for at, one in enumerate(findings) if one.subject == finding.subject)


def _rank(finding: Finding) -> int:
    """Faults first, then notes."""
    return (Verdict.WRONG, Verdict.NOTE, Verdict.RIGHT).index(finding.verdict)
