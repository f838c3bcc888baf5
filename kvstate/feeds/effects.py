"""Carrying out what a feed asks for, on its sink: in order, and in slices."""

from collections import deque
from collections.abc import Callable, Generator, Sequence

from kvstate.errors import WireError
from kvstate.feeds.feed import Feed
from kvstate.feeds.feed_news import FeedNews
from kvstate.feeds.feed_terms import Apply, Demote, Effect, Forget, Replay
from kvstate.feeds.sink import Body, Sink
from kvstate.feeds.turns import Turns


class Effects:
    """What one feed asked for and is not done yet.

    start_replay: from this number on.
    """

    def __init__(
        self,
        feed: Feed[Body],
        sink: Sink,
        turns: Turns,
        news: FeedNews,
        start_replay: Callable[[int], None],
    ) -> None:
        self._feed = feed
        self._sink = sink
        self._turns = turns
        self._news = news
        self._start_replay = start_replay
        self._pending: deque[Effect[Body]] = deque()
        self._work: Generator[None, None, None] | None = None  # the effect that is under way
        self._healed = False

    def __len__(self) -> int:
        return len(self._pending)

    def drop(self) -> None:
        """What was not done yet is not to be done any more."""
        if self._work is not None:
            self._work.close()
            self._work = None
        self._pending.clear()
        self._healed = False

    def put_off(self, effects: Sequence[Effect[Body]]) -> None:
        """Has them carried out with the next ones, before these; nothing is believed until then."""
        self._pending.extend(effects)
        self._sink.trust(False)  # noqa: FBT003

    async def carry_out(self, effects: Sequence[Effect[Body]]) -> None:
        """Carries them out, then lets the sink know what counts.

        Live stream and replay both come here; their effects are carried out in the order in which
        the feed gave them, whoever does it. What lowers the credit does so before its turn comes.
        """
        self._pending.extend(effects)
        if not self._feed.certain or any(isinstance(each, (Demote, Forget)) for each in effects):
            self._sink.trust(False)  # noqa: FBT003
        while self._pending or self._work is not None:
            if self._turns.is_over():
                await self._turns.next(self._news.place.worker)
            self._step()
        if self._healed:
            self._healed = False
            self._feed.healed()
        self._sink.trust(self._feed.certain)
        self._news.tell_change()

    def _step(self) -> None:
        """Does a little of what comes next, if nobody else did it meanwhile."""
        if self._work is None:
            if not self._pending:
                return
            self._work = self._carrying_out(self._pending.popleft())
        work = self._work
        try:
            next(work)
        except StopIteration:
            self._work = None
        except BaseException:
            self._work = None
            raise

    def _carrying_out(self, effect: Effect[Body]) -> Generator[None, None, None]:
        match effect:
            case Apply(body):
                yield from self._applying(body)
            case Forget():
                yield from self._sink.forgetting()
                self._healed = False  # what the feed misses now, it misses since
                self._news.tell_restart()
            case Demote():
                yield from self._sink.demoting()
                self._healed = False
            case Replay(start):
                self._start_replay(start)

    def _applying(self, body: Body) -> Generator[None, None, None]:
        try:
            taken = yield from self._sink.applying(body)
        except WireError as error:
            self._news.tell_undecodable(error)
            self._sink.trust(False)  # noqa: FBT003
            yield from self._sink.demoting()
            self._healed = False
            self._feed.miss(f"a batch could not be decoded: {error}")
            return
        if taken.faults:
            self._news.counts.update(taken.faults)
        if taken.missed:
            self._healed = False
            self._feed.miss(taken.missed)
        elif taken.healed:
            self._healed = True
