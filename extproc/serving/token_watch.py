"""Requests under way that may show whether the router's tokens are the engine's."""

import logging

from msgspec.structs import replace

from extproc.base.logs import NeverFailsTheRequest
from extproc.proof.lookups import SentRequest
from extproc.proof.trust import Proofs
from extproc.routing.decision import Decision
from extproc.routing.load import Booking
from extproc.routing.query import Media, Query
from kvstate.overlap import Prompt

log = logging.getLogger("kvsteer.decision")

_CHECKING = NeverFailsTheRequest(log, "token check failed with %s")


def _text_of(prompt: Prompt, media: Media) -> Prompt:
    """Returns a prompt up to its first media item: the rest is learned."""
    return replace(prompt, tokens=prompt.tokens[: media.text_tokens], sure_tokens=None)


class TokenWatch:
    """What is kept of a request, by its booking, until it ends.

    proofs: of the workers. compares: whether the usage that engines report is compared with the
    prediction.
    """

    def __init__(self, proofs: Proofs, *, compares: bool) -> None:
        self.proofs = proofs
        self._compares = compares
        self._pending: dict[Booking, tuple[str, SentRequest]] = {}
        self._compared: dict[Booking, tuple[Prompt, int]] = {}

    def begin(self, decision: Decision, query: Query, booking: Booking) -> None:
        """Keeps what can be compared once the request is answered, and looked up once it ended."""
        if self._compares and query.sole is not None:
            self._compared[booking] = query.sole, query.forms
        if decision.is_steered and query.forms and len(query.prompts) == 1:
            self._note_sent(decision, query, booking)

    def _note_sent(self, decision: Decision, query: Query, booking: Booking) -> None:
        worker, prompt = decision.worker, query.prompts[0]
        if query.media is not None:
            prompt = _text_of(prompt, query.media)
        with _CHECKING:
            overlap = decision.basis.overlaps[0].get(worker)
            sent = self.proofs.note_sent(worker, prompt, query.forms, overlap)
            if sent is not None:
                self._pending[booking] = worker, sent

    def compared(self, booking: Booking) -> tuple[Prompt, int] | None:
        """Returns the prompt of a request whose reported usage is compared with the prediction.

        Its second value has the forms of the request.
        """
        return self._compared.get(booking)

    def note_answer(self, booking: Booking) -> None:
        """Notes that its worker began to answer a request, without a failure."""
        sent = self._pending.get(booking) if self._pending else None
        if sent is not None:
            self.proofs.answered(sent[1])

    def drop(self, booking: Booking) -> None:
        """Gives up looking up a request that its worker did not compute."""
        sent = self._pending.pop(booking, None)
        if sent is not None:
            self.proofs.dropped(*sent)

    def end(self, booking: Booking) -> None:
        """Has a request that is over looked up, if it is watched."""
        if self._compared:
            self._compared.pop(booking, None)
        sent = self._pending.pop(booking, None) if self._pending else None
        if sent is not None:
            self.proofs.ended(sent[1])
