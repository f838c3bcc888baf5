"""Requests under way that may show whether the router's tokens are the engine's."""

from msgspec.structs import replace

from extproc.proof.lookups import SentRequest
from extproc.proof.samples import SAMPLE
from extproc.proof.trust import Proofs
from extproc.routing.decision import Decision
from extproc.routing.inputs.query import Media, Query
from extproc.routing.load.endpoint_load import Ticket
from kvstate.overlap import Prompt


def _text_of(prompt: Prompt, media: Media) -> Prompt:
    """Returns a prompt up to its first media item: the rest is learned."""
    return replace(prompt, tokens=prompt.tokens[: media.text_tokens], sure_tokens=None)


class TokenWatch:
    """Notes on tickets what shows whether the tokens of requests are the engine's.

    proofs: of the workers. compares: whether the usage that engines report is compared with the
    prediction.
    """

    def __init__(self, proofs: Proofs, *, compares: bool) -> None:
        self.proofs = proofs
        self._compares = compares

    def begin(self, decision: Decision, query: Query, ticket: Ticket) -> None:
        """Keeps what can be compared once the request is answered, and looked up once it ended."""
        handing, forms = decision.handing, query.forms
        if handing is not None and handing.is_handed:
            forms = 0  # its engine shows the ids that go with it, which proves no form
        if self._compares and query.sole is not None:
            ticket.compared = query.sole, forms
        if decision.is_steered and query.forms and len(query.prompts) == 1:
            ticket.sent = self._note_sent(decision, query, forms)

    def _note_sent(
        self, decision: Decision, query: Query, forms: int
    ) -> tuple[str, SentRequest] | None:
        worker, prompt = decision.worker, query.prompts[0]
        if query.media is not None:
            prompt = _text_of(prompt, query.media)
        overlap = decision.basis.overlaps[0].get(worker)
        is_sample = decision.handing is not None and decision.handing.outcome == SAMPLE
        sent = self.proofs.note_sent(worker, prompt, forms, overlap, is_sample=is_sample)
        return None if sent is None else (worker, sent)

    def note_answer(self, ticket: Ticket) -> None:
        """Notes that its worker began to answer a request, without a failure."""
        if ticket.sent is not None:
            self.proofs.answered(ticket.sent[1])

    def drop(self, ticket: Ticket) -> None:
        """Gives up looking up a request that its worker did not compute."""
        if ticket.sent is not None:
            self.proofs.dropped(*ticket.sent)
            ticket.sent = None

    def end(self, ticket: Ticket) -> None:
        """Has a request that is over looked up, if it is watched."""
        if ticket.sent is not None:
            self.proofs.ended(ticket.sent[1])
            ticket.sent = None
