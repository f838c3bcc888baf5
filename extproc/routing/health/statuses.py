"""What the status of a response says about the request and the worker."""

# From this status on, the request has failed.
FIRST_FAILURE = 400

FIRST_SERVER_ERROR = 500
_NOT_FOUND = 404
_TOO_MANY_REQUESTS = 429


def is_uncomputed(status: int) -> bool:
    """Returns whether a worker that answers with this status has not computed the prompt.

    404 and 429 come before it is computed, and after a server error nothing is known to be stored.
    Any other status says nothing: engines check some parameters only after the prompt is computed.
    """
    return status in (_NOT_FOUND, _TOO_MANY_REQUESTS) or status >= FIRST_SERVER_ERROR


def is_workers_failure(status: int) -> bool:
    """Returns whether a worker that answers with this status fails, or has too much to do."""
    return status >= FIRST_SERVER_ERROR or status == _TOO_MANY_REQUESTS
