"""A session and its oracle in Python, which must do the same."""

from extproc._core import Session
from extproc.http2.limits import MIB, Limits
from extproc.http2.session import Sessions
from extproc.serving.proxy_decoder import ProxyDecoder
from tests.oracles.http2.plain_session import PlainSession, PlainSessions

# The messages of most calls are read, but what is no message of a proxy stays bytes.
READING = ProxyDecoder(("x-user",)).reading(b"/service/method")
KINDS: list[type[Sessions | PlainSessions]] = [Sessions, PlainSessions]


class Pair:
    """A session and its oracle that get the same, and must do the same."""

    def __init__(self, limits: Limits, max_message: int, max_bytes: int) -> None:
        self.sessions = [one(limits, max_message, max_bytes, READING) for one in KINDS]
        self.both: list[Session | PlainSession] = [one.open() for one in self.sessions]
        self.events: list[tuple[int, int, object]] = []
        self.greeting = self.compare()

    def compare(self) -> bytes:
        """Asserts that both are in the same state; returns what they send."""
        (one, other), budgets = self.both, [each.budget.used_bytes for each in self.sessions]
        assert (one.is_due, one.has_unsent) == (other.is_due, other.has_unsent)
        written: tuple[list[bytes], list[bytes]] = ([], [])
        assert one.send(written[0].append) == other.send(written[1].append)
        assert written[0] == written[1]
        assert len(b"".join(written[0])) <= MIB
        assert len(written[0]) <= 4
        rest = one.data_to_send()
        assert rest == other.data_to_send()
        assert one.fault == other.fault
        assert (one.is_over, one.stream_count) == (other.is_over, other.stream_count)
        assert budgets[0] == budgets[1]
        return b"".join(written[0]) + rest

    def do(self, name: str, *arguments: object) -> object:
        """Calls the same method of both."""
        one, other = (getattr(each, name)(*arguments) for each in self.both)
        assert one == other
        return one

    def receive(self, data: bytes) -> bytes:
        """Has both take these bytes; returns what they then send."""
        events = self.do("receive", data)
        assert isinstance(events, list)
        self.events += events
        return self.compare()
