"""What became of one request, as far as its response told."""

from collections.abc import Mapping
from typing import NamedTuple

from kvstate.overlap import Overlap, Prompt


class Usage(NamedTuple):
    """What an engine says of a request's prompt; None for what it does not say.

    prompt_tokens: as it counted them, cached ones included. cached_tokens: of them, those it had in
    its cache. form: the name under which it counts the prompt, which tells the APIs apart; "" where
    it does not.
    """

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    form: str = ""


UNKNOWN = Usage()


class Outcome(NamedTuple):
    """One request that a worker was picked for, when it is over.

    model: the configured model, "" if none is known. worker: the configured name of the worker that
    answered; that of the picked one where nobody says otherwise; "" where a stranger answered.
    is_moved: whether another one answered than was picked. status: of HTTP; None where no response
    came. ttft_seconds: from the request's headers to the first byte of its response's body, or to
    the response's headers where the body is not read; None where nothing came. prompt_tokens: as we
    counted them; 0 where they are not known. predicted_tokens: of them, those that the worker
    certainly held at the pick. is_comparable: whether the report is of this one prompt, which is
    `prompt`. is_whole: whether the response was read to its end. held: what every worker held of
    the prompt at the pick, by name.
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
    is_whole: bool = True
    prompt: Prompt | None = None
    held: Mapping[str, Overlap] = {}

    @property
    def error_tokens(self) -> int | None:
        """Predicted minus reported; None where one of them is not known, or makes no sense."""
        cached = self.reported.cached_tokens
        if not self.is_comparable or cached is None or cached > self.prompt_tokens:
            return None
        return self.predicted_tokens - cached
