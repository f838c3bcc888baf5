"""What a source of workers is."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from extproc.discovery.view import View


class TakeView(Protocol):
    """Takes all workers that there are now."""

    def __call__(self, view: View, note: str, fault: str = "") -> None:
        """Note: what is wrong with some of them; fault: as Report's; each "" if there is none."""


class Report(NamedTuple):
    """Where a source tells what it sees; each may be called at any time.

    confirm: the last view still holds. fault: it cannot be known now, and why in words; the last
    view stays.
    """

    view: TakeView
    confirm: Callable[[], None]
    fault: Callable[[str], None]


class Source(Protocol):
    """Something that knows workers."""

    @property
    def name(self) -> str:
        """Its name for people and metrics, one of few."""

    async def run(self, report: Report) -> None:
        """Reports until it is cancelled; whatever goes wrong is a fault, and is tried again."""
