"""A feed whose publisher can be asked for what was missed, apart from the live stream.

To the rules of `kvstate.feeds.feed` it adds (n is the number expected next):

    connected, for whatever time replay from n - 1
    live batch in a replay       hold it
    live batch > n               hold it; ask for a replay from n - 1
    live batch, of a restart     hold it; replay from 0
    replayed batch n             apply; unless one with a known stamp came before it, behind a hole
    replayed batch > n           the publisher's buffer no longer has n: a hole
    replayed batch < n, other    the publisher restarted: forget everything, replay from 0
    replay ends before n - 1     the publisher counts from 0 again: it restarted, likewise
    replay ends short of a held  ask on from there if it brought anything
    replay ends or fails         what is held and does not follow n is behind a hole
    replay failed, later         ask for everything again; its first answer replaces what is held
    silence                      ask once from n - 1, then seldom: a last batch may be lost
    restarts, one after another  replays contradict the live stream: not asked before reconnection

A replay starts at n - 1 and not at n so that its first batch proves that the publisher is still the
same one: vLLM and SGLang send nothing when they start or stop.

A publisher that restarted while its connection stood replays what is heard of it since. One that
seems to restart again and again, and whose replays never hold what was heard, is two publishers:
its replay endpoint is another worker's. What it replays is then worth nothing.
"""

from collections import OrderedDict

from kvstate.feeds.feed import Feed
from kvstate.feeds.feed_terms import Body, Effect, Forget, Numbered, Replay, State
from kvstate.feeds.held import Held

# Restarts over one connection, with no replay between that holds what was heard, after which
# replays are no longer believed.
MAX_RESTARTS_IN_A_ROW = 3
# The last batches of the live stream, which replays are compared with.
MAX_HEARD = 64

OTHER_PUBLISHER = (
    "its replays contradict what it publishes: is `replay` the endpoint of another worker?"
)


class AskingFeed(Feed[Body]):
    """One rank's feed, of a publisher with a replay endpoint."""

    def __init__(self) -> None:
        super().__init__()
        self._held: Held[Body] = Held()
        self._asked_at: int | None = None
        self._overtaken: int | None = None  # where the live stream was when it was started over
        self._proof: float | None = None  # the stamp of the batch that proves the publisher
        self._asks_everything = False
        self._heard = False
        self._heard_stamps: OrderedDict[int, float] = OrderedDict()
        self._restarts_in_a_row = 0
        self._was_answered = False  # since the last of them

    @property
    def _has_replays(self) -> bool:
        """Whether what is replayed is believed to come from this publisher."""
        return self._restarts_in_a_row < MAX_RESTARTS_IN_A_ROW

    def connected(self) -> list[Effect[Body]]:
        """The subscription is in place, for the first time or again."""
        self._heard = True  # it may reach the publisher after the replay and one batch more
        self._heard_stamps.clear()
        self.wants_everything |= not self._has_replays  # they may be this publisher's now
        self._restarts_in_a_row, self._was_answered = 0, False
        return self._ask("connected")

    def failed(self, reason: str) -> list[Effect[Body]]:
        """Something went wrong on this side: everything is to be asked for."""
        effects = super().failed(reason)
        self.wants_everything = True
        return effects

    def replayed(self, batch: Numbered[Body]) -> list[Effect[Body]]:
        """A batch of the replay that was asked for."""
        if not self._has_replays:
            return []
        self._was_answered = True
        if self._heard_stamps.get(batch.sequence) == batch.stamp:
            self._restarts_in_a_row = 0
        effects: list[Effect[Body]] = []
        if self._asks_everything:
            effects += self._start_over()
        expected = self._next
        if expected is not None and batch.sequence < expected:
            return self._overlap(batch)
        if expected is None:
            if batch.sequence > 0:
                self._incomplete = f"batches before {batch.sequence} are no longer to be had"
        elif batch.sequence > expected:
            effects += self._lose(
                expected, batch.sequence - 1, "no longer in the publisher's buffer"
            )
        elif self._unproven is not None:
            effects += self._hole(f"batch {self._unproven} is gone: no proof of the same publisher")
        self._unproven = None
        return effects + self._take(batch)

    def replay_ended(self) -> list[Effect[Body]]:
        """The replay is complete."""
        if not self._has_replays:
            return []
        self._was_answered = True
        if self._unproven is not None or self._asks_everything:
            return self._restart("the publisher counts from 0 again")
        if self._next is None and not self._held:
            self._next = 0
        first = self._overtaken if self._held.first_sequence is None else self._held.first_sequence
        if first is not None and self._next != self._asked_at and first > (self._next or 0):
            return self._ask("more was missed meanwhile")
        return self._catch_up("missing in the replay")

    def replay_failed(self, reason: str) -> list[Effect[Body]]:
        """The replay was not answered, or broke off."""
        self._asks_everything = False
        if self.state is not State.REPLAYING:
            return []  # what it was to mend or to prove is as it was
        self.wants_everything = True
        failed = f"replay failed: {reason}"
        if self._next is not None:
            return [*self._hole(failed), *self._catch_up(failed)]
        self._incomplete = f"{failed}; earlier blocks are unknown"
        return self._catch_up(failed)

    def ask_everything(self) -> list[Effect[Body]]:
        """Some time after a replay failed: asks for all that the publisher still has."""
        is_wanted = self.wants_everything and self.certain and self._has_replays
        if not is_wanted or self._asks_everything:
            return []
        self._asks_everything = True
        self.replays += 1
        self._unproven = None
        self._asked_at = None
        return [Replay(0)]

    def quiet(self, *, for_long: bool = False) -> list[Effect[Body]]:
        """Asks, once, whether a last batch was lost; and now and then."""
        heard, self._heard = self._heard, False
        can_ask = self.certain and self._has_replays and not self._asks_everything
        return self._request() if can_ask and (heard or for_long) else []

    def _receive(self, batch: Numbered[Body]) -> list[Effect[Body]]:
        self._heard = True
        self._note_heard(batch)
        if self.state is State.REPLAYING:
            self._held.append(batch)
            return []
        return self._live(batch)

    def _missed(self, batch: Numbered[Body], expected: int) -> list[Effect[Body]]:
        if not self._has_replays:
            return self._lose(expected, batch.sequence - 1, OTHER_PUBLISHER) + self._take(batch)
        self._held.append(batch)
        return self._ask(f"batches {expected} to {batch.sequence - 1} were missed")

    def _start_anew(self, reason: str, first: Numbered[Body]) -> list[Effect[Body]]:
        effects = self._restart(reason)
        self._note_heard(first)
        if not self._has_replays:
            return effects + self._first(first)
        self._held.append(first)
        return effects

    def _restart(self, reason: str) -> list[Effect[Body]]:
        self._forget_publisher()
        self._heard_stamps.clear()
        self._incomplete = ""
        self._restarts_in_a_row += self._was_answered
        self._was_answered = False
        if not self._has_replays:
            self._settle()
            return [Forget()]
        return [Forget(), *self._ask(f"publisher restarted: {reason}")]

    def _overlap(self, batch: Numbered[Body]) -> list[Effect[Body]]:
        # live batches may have pushed the stamp of the proving one out since it was asked for
        is_proof = batch.sequence == self._unproven
        known = self._proof if is_proof else self._stamps.get(batch.sequence)
        if known is not None and known != batch.stamp:
            return self._restart(f"batch {batch.sequence} was replayed with other contents")
        if known is not None:
            self._unproven = None
        return []

    def _ask(self, reason: str) -> list[Effect[Body]]:
        self.state, self.reason = State.REPLAYING, reason
        return self._request()

    def _request(self) -> list[Effect[Body]]:
        self.replays += 1
        self._asks_everything = False
        self._asked_at, self._overtaken = self._next, None
        start = max(0, (self._next or 0) - 1)
        self._proof = self._stamps.get(start)
        self._unproven = None if self._proof is None else start
        return [Replay(start)]

    def _start_over(self) -> list[Effect[Body]]:
        """The first answer to the question for everything: it replaces what was held."""
        self._asks_everything = self.wants_everything = False
        self._overtaken, self._next = self._next, None
        self._incomplete = ""
        self._stamps.clear()
        self.state, self.reason = State.REPLAYING, "catching up with all batches again"
        return [Forget()]

    def _catch_up(self, why: str) -> list[Effect[Body]]:
        """Takes what was held back during a replay."""
        self._settle()
        held = self._held.take_all()
        effects: list[Effect[Body]] = []
        for position, batch in enumerate(held):
            if self._next is not None and batch.sequence > self._next:
                effects += self._lose(self._next, batch.sequence - 1, why)
                effects += self._take(batch)
                continue
            effects += self._live(batch)
            if self.state is State.REPLAYING:  # it restarted once more
                self._held.extend(held[position + 1 :])
                break
        return effects

    def _note_heard(self, batch: Numbered[Body]) -> None:
        self._heard_stamps[batch.sequence] = batch.stamp
        if len(self._heard_stamps) > MAX_HEARD:
            self._heard_stamps.popitem(last=False)

    def _settle(self) -> None:
        """Without replays that are its own, what was published before is not known."""
        if not self._has_replays:
            self._incomplete = OTHER_PUBLISHER
        super()._settle()

    def _drop_pending(self) -> None:
        super()._drop_pending()
        self._held.clear()
        self._asks_everything = False
