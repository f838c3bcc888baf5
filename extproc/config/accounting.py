"""What is read of responses."""

from dataclasses import dataclass

from extproc.config.key import key

# Each reads what the one before it does, and more.
RESPONSES = ("none", "headers", "usage")


@dataclass(frozen=True, slots=True)
class Accounting:
    """Whether responses are looked at; they are never held, nor changed."""

    responses: str = key(
        "what of responses Envoy shows us: none; headers for status, time to first byte and the"
        " worker that answered; usage for the cached tokens that engines report as well, at a"
        " message for each piece of a response",
        "none",
        choices=RESPONSES,
    )
