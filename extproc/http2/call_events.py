"""What happens to a gRPC call, as a session reports it."""

from typing import Any, Final

# The stream, what happened, and what comes with it. A plain tuple: a request has several.
CallEvent = tuple[int, int, Any]

# It has begun; comes with its path and its traceparent header (b"" without one).
OPENED: Final = 0
# A part of a long message came, not the last part.
PART: Final = 1
# A message came, or the last part of a long one: bytes, or what `MethodDecoder.decoder` made of
# them.
MESSAGE: Final = 2
# The request has ended, and all its messages were given.
ENDED: Final = 3
# `Session.finish` must end it with this status and text; no more of its request is given.
FAILED: Final = 4
# Its stream is gone, and the session has forgotten it.
ABORTED: Final = 5
