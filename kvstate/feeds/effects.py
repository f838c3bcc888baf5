"""Carrying out what a feed asks for, on its sink: in order, and in slices."""

from collections import deque
from collections.abc import Callable, Sequence

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
        self._healed = False

    def __len__(self) -> int:
        return len(self._pending)

    def drop(self) -> None:
        """What was not done yet is not to be done any more."""
        self._pending.clear()
        self._healed = False

    async def carry_out(self, effects: Sequence[Effect[Body]]) -> None:
        """Carries them out, then lets the sink know what counts.

        Live stream and replay both come here; their effects are carried out in the order in which
        the feed gave them, whoever does it. What lowers the credit does so before its turn comes.
        """
        self._pending.extend(effects)
        if not self._feed.certain or any(isinstance(each, (Demote, Forget)) for each in effects):
            self._sink.trust(False)  # noqa: FBT003
        while self._pending:
            if self._turns.is_over():
                await self._turns.next(self._news.place.worker)
            if self._pending:  # nobody else did it meanwhile
                self._carry_out(self._pending.popleft())
        if self._healed:
            self._healed = False
            self._feed.healed()
        self._sink.trust(self._feed.certain)
        self._news.tell_change()

    def _carry_out(self, effect: Effect[Body]) -> None:
        match effect:
            case Apply(body):
                self._apply(body)
            case Forget():
                self._sink.forget()
                self._healed = False  # what the feed misses now, it misses since
                self._news.tell_restart()
            case Demote():
                self._sink.demote()
                self._healed = False
            case Replay(start):
                self._start_replay(start)

    def _apply(self, body: Body) -> None:
        try:
            taken = self._sink.apply(body)
        except WireError as error:
            self._news.tell_undecodable(error)
            self._sink.demote()
            self._healed = False
            self._feed.miss("a batch could not be decoded")
            return
        if taken.faults:
            self._news.counts.update(taken.faults)
        if taken.missed:
            self._healed = False
            self._feed.miss(taken.missed)
        elif taken.healed:
            self._healed = True
