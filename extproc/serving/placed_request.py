"""A request that the router decided on, until it is settled: its response, and all that it began.

Its life: made with the decision; `await_response` if the proxy will send the response; `look_at`
for each message of it; `settle` once, at the end of the stream, or as soon as the request is
decided if the stream ended before, or the request is refused.
"""

import logging

import msgspec

from extproc.base.logs import log_fault
from extproc.features.hooks import tell
from extproc.observing.outcomes import Account, Outcome
from extproc.observing.usage import UsageScanner
from extproc.requests.request import NOT_INFERENCE
from extproc.requests.responses_request import PATH as RESPONSES_PATH
from extproc.routing.decision import Decision
from extproc.routing.health.statuses import FIRST_FAILURE
from extproc.routing.load.endpoint_load import Ticket
from extproc.serving.proxy_message import RESPONSE_BODY, RESPONSE_HEADERS, ProxyMessage
from extproc.serving.shared_by_streams import SharedByStreams
from extproc.serving.stream import Stream

log = logging.getLogger("kvsteer.extproc")


class PlacedRequest(msgspec.Struct, eq=False):
    """One request between its decision and its end."""

    service: SharedByStreams
    stream: Stream
    decision: Decision
    # None if it is no worker's load.
    ticket: Ticket | None
    # When its headers arrived.
    began_at: float
    # Of the response, None if that is not shown.
    account: Account | None = None
    # Of a response that may show a model's work, None if it is a known API's.
    scanner: UsageScanner | None = None
    # Whether the proxy still has to report which endpoint answered.
    awaits_server: bool = False
    # Whether it is remembered which worker keeps the response, for requests that continue it.
    is_remembered: bool = False

    def await_response(self, *, accounts: bool) -> None:
        """Prepares for the response, of which the proxy will send at least the headers.

        accounts: whether responses are accounted for.
        """
        decision, ticket, router = self.decision, self.ticket, self.service.router
        if ticket is None:
            if decision.reason == NOT_INFERENCE and self.stream.reads_usage:
                self.scanner = UsageScanner()
            return
        # the proxy sends every response in dialect B (Endpoint Picker Protocol 1.0.0)
        sees_responses = self.stream.is_duplex or accounts
        self.awaits_server = True
        if decision.is_steered:
            router.deliveries.look(decision.model)
        if sees_responses:
            self.account = Account(decision, ticket.compared, self.began_at)

    def proxy_endpoint(self) -> str:
        """Returns the endpoint for an unsteered request; "" if the proxy chooses by itself."""
        if not self.stream.is_duplex or self.ticket is None:
            return ""
        endpoint = self.service.router.any_endpoint(self.decision, self.ticket)
        if self.account is not None:
            self.account.note_proxy_endpoint(endpoint)
        return endpoint

    def look_at(self, message: ProxyMessage) -> None:
        """Accounts for a message if it is part of the response."""
        try:
            if self.scanner is not None:
                self._look_at_unknown(message, self.scanner)
            elif self.ticket is None:
                return
            elif message.kind == RESPONSE_HEADERS:
                self._look_at_headers(self.ticket)
            elif self.account is not None and self.service.reads_usage:
                self._look_at_body(message, self.account)
        except Exception as error:  # noqa: BLE001 - whatever it is, the response must go on
            log.error("accounting failed with %s", type(error).__name__)
            self.account = None

    def _look_at_unknown(self, message: ProxyMessage, scanner: UsageScanner) -> None:
        """Reads the response to a request that calls no model, as far as is known."""
        head = self.stream.response_head
        if message.kind != RESPONSE_BODY or head is None or not head.is_readable:
            return
        if head.status is not None and head.status < FIRST_FAILURE:
            scanner.read(message.body)

    def _look_at_headers(self, ticket: Ticket) -> None:
        head, account, router = self.stream.response_head, self.account, self.service.router
        if head is None:
            return
        if account is not None:
            account.respond(head.status, head.served, self.service.monotonic())
        if head.served and self.awaits_server:
            self.awaits_server = False  # reported once
            router.note_server(self.decision, ticket, head.served)
        if head.status is not None:
            router.note_answer(ticket, head.status, head.served)

    def _look_at_body(self, message: ProxyMessage, account: Account) -> None:
        head = self.stream.response_head
        if message.kind == RESPONSE_BODY and head is not None and head.is_readable:
            account.read(message.body, self.service.monotonic(), is_last=message.is_last)
            if self.stream.head.path == RESPONSES_PATH and not self.is_remembered:
                self.is_remembered = self.service.router.remember_response(
                    self.decision, account.worker, account.response_id
                )

    def settle(self, *, is_sent: bool) -> None:
        """Ends everything that the request began.

        is_sent: whether the proxy got its answers; if not, it was refused, or placing it failed.
        """
        router, ticket = self.service.router, self.ticket
        if ticket is not None:
            try:
                if not is_sent:
                    router.withdraw(ticket)
            finally:
                router.release(ticket)
        if self.awaits_server and self.decision.is_steered:
            router.deliveries.note_unreported(self.decision.model)
        outcome = None
        if is_sent and (self.account is not None or self.scanner is not None):
            try:
                outcome = self._outcome()
            except Exception as error:  # noqa: BLE001 - the connection's other streams must go on
                log_fault(log, "accounting failed with %s", error)
        ended = self.service.hooks.note_end
        if ended:
            tell(ended, self.decision, outcome, is_booked=ticket is not None, is_sent=is_sent)

    def _outcome(self) -> Outcome | None:
        """Counts what the response showed, and returns it; None if it is not known."""
        service = self.service
        if self.scanner is not None and self.scanner.usage.form:
            service.stream_settings.learned.learn(self.stream.head.path)
        if self.account is None or not (self._sees_every_response or self.stream.response_head):
            return None
        outcome = service.metrics.observe_outcome(self.account.outcome())
        service.router.note_usage(outcome)
        return outcome

    @property
    def _sees_every_response(self) -> bool:
        """Whether the proxy sends every response, so that a missing one means there was none."""
        return self.service.accounts or self.stream.is_duplex
