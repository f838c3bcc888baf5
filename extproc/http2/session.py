"""Opens sessions: the gRPC calls of one connection, bytes in, events and bytes out.

This folder is HTTP/2 and gRPC's framing, and nothing else: a session turns the bytes of one
connection into events of its calls (`call_events`), and answers into bytes. It has no socket, no
clock and no task: `extproc.serving` reads and writes, and calls `tick` at regular times. It knows
neither Envoy's messages nor requests; which messages are decoded on the way, it is given
(`method_decoder`).

The rule: whatever a peer sends costs a bounded amount, and ends at worst its own call or
connection; `limits` says how much of each thing is allowed, with the reason, and `Session.fault`
what was broken.

`extproc/native/` has the session, and the stub of `extproc._core` its interface. Tests compare it
with a session in Python, event by event and byte by byte (tests/oracles/http2).
"""

from dataclasses import astuple

from extproc._core import Budget, Session
from extproc.http2.limits import Limits
from extproc.http2.method_decoder import MethodDecoder


class Sessions:
    """Opens the sessions of a server.

    max_message_bytes: longest message of a request. max_bytes: of the budget, the limit of what
    they keep together. reading: which messages the sessions read; None for none.
    """

    def __init__(
        self,
        limits: Limits,
        max_message_bytes: int,
        max_bytes: int,
        reading: MethodDecoder | None = None,
    ) -> None:
        self.budget = Budget(max_bytes)
        self._reading = reading
        self._limits = astuple(limits)
        self._max_message_bytes = max_message_bytes

    def open(self, share: Budget | None = None) -> Session:
        """Returns the session of a new connection, which has its greeting to send.

        share: its peer's, of `budget`; None for a peer that may take all.
        """
        budget = self.budget if share is None else share
        return Session(self._limits, self._max_message_bytes, budget, self._reading)
