"""What is heard on one rank's feed, and what it proves."""

from collections import deque
from collections.abc import Iterable, Iterator

from extproc.doctor.answers import judge_clock
from extproc.doctor.findings import About, Finding
from kvstate.errors import WireError
from kvstate.events import BlocksStored, EventBatch, Tokens
from kvstate.wire.zmq_wire import decode_batch

# What is decoded of a feed; no engine publishes as much in the seconds that the doctor listens.
MAX_MESSAGES = 20_000
MAX_BYTES = 128 * 1024 * 1024
MAX_CHAINS = 4_096

# Blocks with so many tokens of a prompt that nobody else sends are its blocks.
ENOUGH_TOKENS = 8


class Heard:
    """What one rank's transport signalled, summed up.

    is_live: messages carry the publisher's own time, and come as they are published. provoked: the
    tokens of a request whose blocks were heard here, and the first batch that may have them.
    """

    def __init__(self, rank: int, *, is_live: bool) -> None:
        self.rank = rank
        self.is_live = is_live
        self.is_connected = False
        self.refused = ""
        self.lost = ""
        self.batches = 0
        self.unreadable = 0
        self.first_sequence: int | None = None
        self.last_sequence: int | None = None
        self.provoked: tuple[Tokens, int] | None = None
        self.missing = 0
        self.ahead_seconds: float | None = None
        self.block_sizes: set[int] = set()
        self.ranks: set[int] = set()
        self._chains: deque[Tokens] = deque(maxlen=MAX_CHAINS)
        self._messages = 0
        self._bytes = 0

    @property
    def is_over_limit(self) -> bool:
        """Whether more came than is listened to."""
        return self._messages > MAX_MESSAGES or self._bytes > MAX_BYTES

    def count_message(self) -> None:
        """Something came, whatever it is."""
        self._messages += 1

    def holds(self, tokens: Tokens) -> bool:
        """Whether blocks of this prompt, which nobody else sends, were stored."""
        whole = tokens.tobytes()
        known = sum(len(chain) for chain in self._chains if _is_part(chain.tobytes(), whole))
        return known >= min(ENOUGH_TOKENS, len(tokens))

    def take(self, sequence: int, body: bytes | EventBatch, now: float) -> None:
        """Takes a batch in.

        body: a payload of the wire, or what it was decoded to. now: seconds since the epoch.
        """
        self.batches += 1
        if self.last_sequence is not None and sequence > self.last_sequence + 1:
            self.missing += sequence - self.last_sequence - 1
        self.last_sequence = sequence
        if self.first_sequence is None:
            self.first_sequence = sequence
        if isinstance(body, bytes):
            self._bytes += len(body)
        try:
            batch = body if isinstance(body, EventBatch) else decode_batch(body)
        except WireError:
            self.unreadable += 1
            return
        if self.is_live:
            self._note_time(batch.timestamp - now)
        if batch.rank is not None:
            self.ranks.add(batch.rank)
        for event in batch.events:
            if isinstance(event, BlocksStored):
                self.block_sizes.add(event.block_size)
                self._chains.append(event.tokens)

    def _note_time(self, ahead_seconds: float) -> None:
        """The batch that was on its way for the shortest time tells best."""
        if self.ahead_seconds is None or abs(ahead_seconds) < abs(self.ahead_seconds):
            self.ahead_seconds = ahead_seconds


def _is_part(chain: bytes, whole: bytes) -> bool:
    at = whole.find(chain)
    return at >= 0 and at % 4 == 0


def judge_heard(about: About, heard: Iterable[Heard]) -> Iterator[Finding]:
    """What is right and wrong with a worker's feeds that connected."""
    all_heard = list(heard)
    batches = sum(one.batches for one in all_heard)
    unreadable = sum(one.unreadable for one in all_heard)
    if unreadable:
        says = f"{unreadable} of {batches or unreadable} messages could not be read"
        yield about.wrong("feed-unreadable", says)
    elif batches:
        yield about.right("feed", f"batches that came and were read: {batches}")
    if any(one.is_over_limit for one in all_heard):
        yield about.wrong("feed-flooded", f"{batches} batches came, more than were listened to")
    for one in all_heard:
        others = sorted(one.ranks - {one.rank})
        if one.is_live and others:
            says = f"the feed of rank {one.rank} has events of rank {others[0]}"
            yield about.wrong("ranks-mixed-up", says)
    times = [one.ahead_seconds for one in all_heard if one.ahead_seconds is not None]
    if times:
        yield judge_clock(about, min(times, key=abs), "the time in its batches")
