"""One report of a source that asks for several things, each of which may fail alone."""

from extproc.discovery.sources import Report
from extproc.discovery.view import View


class PartReports:
    """Reports of the parts, told on as one: a fault lasts until its own part is well.

    What fails in several parts in the same words is told once, and a view that comes while a part
    fails does not make the source well.
    """

    def __init__(self, report: Report) -> None:
        self._report = report
        self._faults: dict[str, str] = {}

    def viewing(self, part: str) -> Report:
        """The report of the part that gives the views; what it confirms is confirmed."""
        return Report(
            self._view, lambda: self._confirm(part), lambda fault: self._note(part, fault)
        )

    def aside(self, part: str) -> Report:
        """The report of a part that only has to be well; it confirms no view."""
        return self.viewing(part)._replace(confirm=lambda: self._confirm_aside(part))

    def _view(self, view: View, note: str, fault: str = "") -> None:
        self._report.view(view, note, fault or self._fault())

    def _confirm(self, part: str) -> None:
        if not self._heal(part) and not self._faults:
            self._report.confirm()

    def _confirm_aside(self, part: str) -> None:
        self._heal(part)

    def _note(self, part: str, fault: str) -> None:
        self._faults[part] = fault
        self._report.fault(self._fault())

    def _heal(self, part: str) -> bool:
        """Whether it was at fault; what is left of all faults is told then."""
        if self._faults.pop(part, None) is None:
            return False
        if self._faults:
            self._report.fault(self._fault())
        else:
            self._report.confirm()
        return True

    def _fault(self) -> str:
        return "; ".join(dict.fromkeys(self._faults.values()))
