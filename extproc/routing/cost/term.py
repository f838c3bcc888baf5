"""Terms: the summands of the cost beyond the work that every worker has.

The cost of a worker is the tokens of the prompt that it lacks, those queued there, and the requests
that it runs (`extproc.routing.cost.survey`), plus what each term charges. A term is asked only if
the request is one that it concerns.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from extproc.routing.cost.fetch import Fetch
from extproc.routing.cost.survey import Survey
from extproc.routing.savings.savings import Savings


class Charge(msgspec.Struct, frozen=True, gc=False):
    """What one term adds to the costs of the compared workers.

    name: the term's, as POST /explain shows it. tokens: of prefill work, in the survey's order;
    negative if they lower the cost. fetches: what workers would fetch for it, by name.
    """

    name: str
    tokens: Sequence[float]
    fetches: Mapping[str, Fetch] = {}


class Term(Protocol):
    """One summand of the cost of a request; it changes nothing."""

    def charge(self, survey: Survey, savings: Savings) -> Charge | None:
        """Returns what it adds for each worker of a survey; None if it adds nothing."""
