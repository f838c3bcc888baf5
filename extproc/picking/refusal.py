"""What a client is told where a request is to reach no worker: errors as OpenAI's API has them."""

from typing import NamedTuple

import msgspec

from extproc.picking.decision import Verdict

# When a client that was refused because all workers are busy may come again.
RETRY_AFTER_SECONDS = 1


class Refusal(NamedTuple):
    """An answer of ours, in the place of a worker's; body is JSON."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


def refusal_of(verdict: Verdict) -> Refusal | None:
    """The answer that a verdict asks for; None where the request goes on."""
    if verdict is Verdict.SHED:
        retry = ("retry-after", str(RETRY_AFTER_SECONDS))
        return _refusal(429, "RateLimitError", "all workers are busy; try again", retry)
    if verdict is Verdict.UNAVAILABLE:
        return _refusal(503, "ServiceUnavailableError", "no worker can take this request")
    return None


def _refusal(status: int, kind: str, message: str, *headers: tuple[str, str]) -> Refusal:
    error = {"message": message, "type": kind, "param": None, "code": status}
    body = msgspec.json.encode({"error": error})
    return Refusal(status, (("content-type", "application/json"), *headers), body)
