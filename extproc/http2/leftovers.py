"""What is left to do for a connection when a session has sent what was due: bits of a number."""

from typing import Final

# Data that the peer does not wait for was kept back; it may wait for more.
KEPT_BACK: Final = 1
# No stream is open, and no new one can come: the connection can be closed.
OVER: Final = 2
# The peer broke a rule, so that the connection must end: `Session.fault` says which.
FAULTY: Final = 4
# As much was written as is written at a time, and there is more: send again when others had a turn.
MORE: Final = 8
