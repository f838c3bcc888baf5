"""Crowding: a new conversation avoids workers on which many others live."""

from collections.abc import Callable, Mapping, Sequence
from itertools import compress

from extproc.routing.cost.survey import Survey
from extproc.routing.cost.term import Charge
from extproc.routing.savings.savings import Savings

# A conversation of its own that lives on a worker is as much work to be expected as so many tokens.
CONVERSATION_TOKENS = 1_024.0

CONVERSATIONS = "conversations"


class Crowding:
    """The term of a request that begins a conversation.

    conversations: returns how many live on a worker, by its name. ejected: failing endpoints.
    """

    def __init__(self, conversations: Callable[[str], int], ejected: Mapping[str, str]) -> None:
        self._conversations = conversations
        self._ejected = ejected

    def charge(self, survey: Survey, savings: Savings) -> Charge | None:
        """Returns by how much more than others each worker costs for the conversations there."""
        tokens = self._tokens(survey, savings.saved)
        if not any(tokens):
            return None
        loads, affinity = survey.loads, survey.affinity
        more = [affinity * each * loads[at].slowness for at, each in enumerate(tokens)]
        return Charge(CONVERSATIONS, more)

    def _tokens(self, survey: Survey, saved: Mapping[str, float]) -> Sequence[float]:
        """Returns by how many tokens a new conversation avoids each worker.

        Each conversation that a worker has beyond the sound one with the fewest counts half of what
        the request could save anywhere, and a little more. So a shared prefix is worth one of them
        and never two, however long it is.
        """
        if not survey.workers:
            return ()
        live = [self._conversations(one.name) for one in survey.workers]
        sound = [one.endpoint not in self._ejected for one in survey.workers]
        least = min(compress(live, sound), default=min(live))
        most_saved = max([saved.get(one.name, 0.0) for one in survey.workers])
        each = CONVERSATION_TOKENS + most_saved / 2
        return [each * max(0, count - least) for count in live]
