"""The table of states and events in kvstate.feeds.feed says exactly what the code does."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterator

from kvstate.feeds import feed as module
from kvstate.feeds.feed import Feed, FeedState
from kvstate.feeds.feed_sources import Recovery
from tests.kvstate.feeding import batch, undecodable

LETTERS = {"C": FeedState.CONNECTING, "R": FeedState.REPLAYING, "L": FeedState.LIVE}
LETTERS |= {"D": FeedState.DEGRADED, "S": FeedState.STALE, "U": FeedState.UNSUPPORTED}
# All that happens in half of the walks, whose connection stays up.
STANDING = ("received", "received", "replayed", "replay_ended", "healed", "miss", "quiet")
WALKS, STEPS = 1_000, 40

Table = dict[tuple[str, FeedState], set[FeedState]]


def written() -> Table:
    """The table of the module's docstring."""
    lines = (module.__doc__ or "").splitlines()
    head = next(at for at, line in enumerate(lines) if line.split() == ["event", *LETTERS])
    rows = iter(lines[head + 1 :])
    found: Table = {}
    while row := next(rows).split():
        event, *cells = row
        for letter, cell in zip(LETTERS, cells, strict=True):
            ends = {LETTERS[one] for one in cell} if cell != "." else {LETTERS[letter]}
            found[event, LETTERS[letter]] = ends
    return found


def events(feed: Feed, chance: random.Random) -> dict[str, Callable[[], object]]:
    """What may happen next, each with batches near the one that is expected."""
    number = max(0, (feed.last_sequence or 0) + chance.choice([-2, -1, 0, 1, 1, 1, 2]))
    life = chance.choice(["old", "old", "new"])
    came = undecodable(number) if chance.random() < 0.1 else batch(number, life)
    return {
        "connected": feed.connect,
        "disconnected": feed.disconnect,
        "failed": lambda: feed.fail("a fault"),
        "refused": lambda: feed.refuse("none"),
        "received": lambda: feed.receive(came),
        "replayed": lambda: feed.receive_replayed(came),
        "replay_ended": feed.end_replay,
        "replay_failed": lambda: feed.fail_replay("silent"),
        "ask_again": feed.ask_again,
        "ask_everything": feed.ask_everything,
        "snapshot": lambda: feed.snapshot(number, number + 1, chance.choice([0, 1])),
        "snapshot_late": feed.note_late_snapshot,
        "healed": feed.heal,
        "miss": lambda: feed.miss("something"),
        "quiet": lambda: feed.quiet(for_long=chance.random() < 0.5),
    }


def walked() -> Iterator[tuple[str, FeedState, FeedState]]:
    """Event, state before and state after, for random events of many feeds."""
    chance = random.Random(5)
    for walk in range(WALKS):
        feed = Feed(chance.choice([*Recovery, Recovery.REPLAY, Recovery.REPLAY]))
        feed.connect() if walk % 2 else None
        for _ in range(STEPS):
            before = feed.state
            possible = events(feed, chance)
            event = chance.choice([*STANDING] if walk % 2 else [*possible, *STANDING])
            possible[event]()
            yield event, before, feed.state


def test_transitions_equal_the_documented_table() -> None:
    seen: Table = defaultdict(set)
    for event, before, after in walked():
        seen[event, before].add(after)
    assert seen == written()
