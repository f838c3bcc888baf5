"""The account of one request: what its response tells, set against what was decided."""

from extproc.accounting.outcome import UNKNOWN, Outcome
from extproc.accounting.usage_scanner import UsageScanner
from extproc.picking.decision import Decision
from extproc.picking.placing import FIRST_FAILURE
from kvstate.overlap import Prompt


class Account:
    """One request on its way; a worker was picked for it.

    sole: its prompt, where an engine's report can be compared with what was predicted for it.
    began_at: when its headers came; times are seconds of one monotonic clock.
    """

    def __init__(self, decision: Decision, sole: Prompt | None, began_at: float) -> None:
        self._decision = decision
        self._sole = sole
        self._began_at = began_at
        self._worker = decision.worker
        self._status: int | None = None
        self._headers_at: float | None = None
        self._first_byte_at: float | None = None
        self._scanner: UsageScanner | None = None
        self._is_whole = False

    @property
    def has_failed(self) -> bool:
        """Whether the response says that the prompt was not computed."""
        return self._status is not None and self._status >= FIRST_FAILURE

    def respond(self, status: int | None, served: str, now: float) -> str | None:
        """Takes the response's headers; the endpoint that answered, where it is not the picked one.

        served: that endpoint, "" if the proxy does not tell.
        """
        self._status = status
        self._headers_at = now
        if not served or served == self._decision.pick[0]:
            return None
        self._worker = self.worker_at(served)
        return served

    def worker_at(self, endpoint: str) -> str:
        """The name of the worker at an endpoint; "" for one that is not ours."""
        names = [one.name for one in self._decision.workers if one.endpoint == endpoint]
        return names[0] if names else ""

    def read(self, piece: bytes, now: float, *, is_last: bool = False) -> None:
        """Takes a piece of the response's body."""
        self._is_whole = is_last
        if self._first_byte_at is None and piece:
            self._first_byte_at = now
        if self._scanner is None:
            self._scanner = UsageScanner()
        self._scanner.read(piece)

    def outcome(self) -> Outcome:
        """What is known when the stream is over."""
        decision, worker = self._decision, self._worker
        held = [each[worker].certain_tokens for each in decision.held if worker in each]
        first = self._headers_at if self._first_byte_at is None else self._first_byte_at
        return Outcome(
            model=decision.model or "",
            worker=worker,
            is_moved=worker != decision.worker,
            status=self._status,
            ttft_seconds=None if first is None else first - self._began_at,
            prompt_tokens=decision.prompt_tokens,
            predicted_tokens=sum(held),
            reported=UNKNOWN if self._scanner is None else self._scanner.usage,
            is_comparable=self._sole is not None and not self.has_failed,
            is_whole=self._is_whole,
            prompt=self._sole,
            held=decision.held[0] if len(decision.held) == 1 else {},
        )
