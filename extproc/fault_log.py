"""One line and its frames for a fault of ours that a request must not suffer from."""

import logging
import traceback

log = logging.getLogger("kvsteer.decision")


def tell_fault(what: str, error: Exception) -> None:
    """Where it happened, never what the exception says: that may quote a prompt."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    log.error(f"{what}\n%s", type(error).__name__, frames)  # noqa: G004 - a constant
