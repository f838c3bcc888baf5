"""What became of one request, as far as its response told."""

from typing import NamedTuple


class Usage(NamedTuple):
    """What an engine says of a request's prompt; None for what it does not say.

    prompt_tokens: as it counted them. cached_tokens: of them, those it had in its cache.
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None


UNKNOWN = Usage()


class Outcome(NamedTuple):
    """One request that a worker was picked for, when it is over.

    model: the configured model, "" if none is known. worker: the configured name of the worker that
    answered; that of the picked one where nobody says otherwise; "" where a stranger answered.
    is_moved: whether another one answered than was picked. status: of HTTP; None where no response
    came. ttft_seconds: from the request's headers to the first byte of its response's body, or to
    the response's headers where the body is not read; None where nothing came. prompt_tokens: as we
    counted them; 0 where they are not known. predicted_tokens: of them, those that the worker
    certainly held at the pick. is_comparable: whether the report is of this one prompt.
    """

    model: str
    worker: str
    is_moved: bool
    status: int | None
    ttft_seconds: float | None
    prompt_tokens: int
    predicted_tokens: int
    reported: Usage
    is_comparable: bool

    @property
    def error_tokens(self) -> int | None:
        """Predicted minus reported; None where one of them is not known, or makes no sense."""
        cached = self.reported.cached_tokens
        if not self.is_comparable or cached is None or cached > self.prompt_tokens:
            return None
        return self.predicted_tokens - cached
