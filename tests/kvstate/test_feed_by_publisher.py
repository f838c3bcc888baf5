"""A feed against a publisher that restarts, and a network that loses, both simulated."""

from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstate.events import Batch
from kvstate.feeds.feed import Demote, Effect, Feed, Forget, RequestReplay
from kvstate.feeds.feed_sources import Recovery
from kvstate.feeds.held_batches import HeldBatches
from kvstate.feeds.stamps import STRANGE_BATCHES, Stamps

BUFFER_BATCHES = 6


class Published(NamedTuple):
    """A batch by the publisher's incarnation and its number."""

    life: int
    number: int

    @classmethod
    def of(cls, batch: Batch) -> "Published":
        """What the payload of a batch says."""
        assert isinstance(batch.body, bytes)
        life, number = map(int, batch.body.split())
        return cls(life, number)


class PublisherMachine(RuleBasedStateMachine):
    """The believed batches are those applied since the last effect that makes them uncertain."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = 0.0
        self.life = 0
        self.longest = 0  # the most batches of one life
        self.published: list[Batch] = []
        self.undelivered: list[Batch] = []
        self.connected = False
        self.answer: list[Batch] | None = None
        self.believed: list[Published] = []
        self.queued: list[Batch] = []

    @initialize(recovery=st.sampled_from(Recovery))
    def start(self, *, recovery: Recovery) -> None:
        self.recovery = recovery
        self.feed = Feed(recovery, HeldBatches(max_batches=4), Stamps(4, 8))  # most are forgotten

    @rule(count=st.integers(1, 4))
    def publish(self, count: int) -> None:
        for _ in range(count):
            self.clock += 1
            number = len(self.published)
            stamp = self.clock + self.life / 1024  # two lives have no stamp in common
            batch = Batch(number, f"{self.life} {number}".encode(), stamp)
            self.published.append(batch)
            self._send(batch)

    @rule()
    def publish_and_deliver(self) -> None:
        self.publish(3)
        self.deliver(len(self.undelivered))

    @rule()
    def reconnect_and_answer(self) -> None:
        self.connect()
        self.answer_replay(BUFFER_BATCHES + 1)

    @rule()
    def publish_garbage(self) -> None:
        batch = Batch(len(self.published), b"", fault="no batch")
        self.published.append(batch)
        self._send(batch)

    @rule(count=st.integers(1, 5))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.undelivered))):
            self._do(self.feed.receive(self.undelivered.pop(0)))

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        if self.undelivered:
            at = data.draw(st.integers(0, len(self.undelivered) - 1))
            if not self._is_told_for_sure(self.undelivered[at]):
                del self.undelivered[at]

    @rule()
    def connect(self) -> None:
        if not self.connected:
            self.connected = True
            self._do(self.feed.connect())
            self.undelivered = self._begins_with()

    @rule()
    def disconnect(self) -> None:
        if self.connected:
            self.connected = False
            self.queued = [batch for batch in self.undelivered if self._is_told_for_sure(batch)]
            self.undelivered = []
            self.answer = None
            self._do(self.feed.disconnect())

    @rule(count=st.integers(0, 4), seconds=st.sampled_from([-100, 0, 100]))
    def restart(self, count: int, seconds: int) -> None:
        """Restarts the publisher, on a host whose clock may be behind or ahead."""
        self.disconnect()
        self.life += 1
        self.clock += seconds
        self.longest = max(self.longest, len(self.published))
        self.published = []
        self.queued = []
        self.publish(max(count, 1) if self.recovery is Recovery.QUEUED else count)

    @rule(count=st.integers(1, 9))
    def answer_replay(self, count: int) -> None:
        for _ in range(count):
            if self.answer:
                self._do(self.feed.receive_replayed(self.answer.pop(0)))
            elif self.answer is not None:
                self.answer = None
                self._do(self.feed.end_replay())

    @rule()
    def fail_replay(self) -> None:
        if self.answer is not None:
            self.answer = None
            self._do(self.feed.fail_replay("silent"))

    @rule()
    def fall_silent(self) -> None:
        if self.answer is None and not self.undelivered:
            self._do(self.feed.quiet())

    @rule()
    def try_again(self) -> None:
        if self.answer is None:
            self._do(self.feed.ask_everything())

    @invariant()
    def what_is_certain_is_a_contiguous_run_of_the_present_publisher(self) -> None:
        if not self.feed.certain or not self.believed:
            return
        first = self.believed[0].number
        run = range(first, first + len(self.believed))
        assert self.believed == [Published(self.life, number) for number in run]

    @invariant()
    def what_is_certain_ends_with_the_last_batch_that_arrived(self) -> None:
        if self.feed.certain and self.believed:
            assert self.feed.last_sequence is not None
            assert self.believed[-1].number == self.feed.last_sequence

    def teardown(self) -> None:
        self.settle()

    def settle(self) -> None:
        """Checks that without further losses the feed is certain of all that is published next."""
        self.disconnect()
        self.connect()
        self.deliver(len(self.undelivered))
        for _ in range(4):
            self.answer_replay(BUFFER_BATCHES + 1)
        stride = 2 * max(1, self.longest // 8)
        for _ in range(STRANGE_BATCHES * stride + 4):  # until a restart is noticed
            self.publish(1)
            self.deliver(1)
            for _ in range(2):
                self.answer_replay(BUFFER_BATCHES + 4)
        self.publish(3)
        self.deliver(3)
        for _ in range(4):
            self.answer_replay(BUFFER_BATCHES + 4)
        assert self.feed.certain
        assert [body.number for body in self.believed][-3:] == [
            len(self.published) - back for back in (3, 2, 1)
        ]
        self.what_is_certain_is_a_contiguous_run_of_the_present_publisher()

    def _is_told_for_sure(self, batch: Batch) -> bool:
        """A queue is assumed to lose events on the way, but not the first after a restart."""
        return self.recovery is Recovery.QUEUED and batch.sequence == 0

    def _send(self, batch: Batch) -> None:
        if self.connected:
            self.undelivered.append(batch)
        elif self.recovery is Recovery.QUEUED:
            self.queued.append(batch)

    def _begins_with(self) -> list[Batch]:
        """What a new connection delivers before anything is published on it."""
        if self.recovery is Recovery.QUEUED:
            queued, self.queued = self.queued, []
            return queued
        if self.recovery is not Recovery.RESUME:
            return []
        last = self.feed.last_sequence
        start = 0 if last is None or last >= len(self.published) else last
        return [batch for batch in self.published[-BUFFER_BATCHES:] if batch.sequence >= start]

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Batch():
                    self.believed.append(Published.of(effect))
                case Forget() | Demote():
                    self.believed = []
                case RequestReplay():
                    kept = self.published[-BUFFER_BATCHES:]
                    self.answer = [batch for batch in kept if batch.sequence >= effect.start]


TestFeedByPublisher = PublisherMachine.TestCase
TestFeedByPublisher.settings = settings(stateful_step_count=40)
