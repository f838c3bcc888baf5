"""Looks up whether workers stored the prompts of some requests as they are tokenized here.

A request that was sent to a worker with a live feed is looked up in the index once it is over: the
feed has announced its blocks by then. If the worker holds all that can be reused, or its last block
was stored since the request was sent and is gone again, its tokens are KVSteer's. If that block was
not stored, although the feed said something meanwhile, that counts as not stored; all others say
nothing: requests that were refused or answered elsewhere, prompts that were cached or are shorter
than a block, workers without prefix caching, and feeds with a hole.

That a prompt is not held any more is therefore no evidence, however small and full the cache: from
the moment a request is sent, the index watches for the key of its last block (`Owner.watch`), which
depends on all its tokens. A worker with another tokenizer stores other keys, in any cache.

A look-up shows too whether the feed told of an answered prompt at all (`has_published`).

Few requests are looked up, and one in each step: the index is asked for at most MAX_PROMPT_TOKENS.
Time is an argument: seconds of one monotonic clock.
"""

from dataclasses import dataclass

from kvstate.index.owner import WATCHED_PROMPTS
from kvstate.overlap import Overlap, Prompt, usable_tokens

# Events of a request may arrive after its answer; SGLang and TensorRT-LLM store it at its end.
GRACE_SECONDS = 1.0

# A request that lasts longer is long: its feed may have had a hole meanwhile that has healed, so
# that it can only show that its blocks were stored. After its end, one that was not looked up for
# this time is given up.
MAX_SECONDS = 60.0

# The silence after an answered request that shows something: counts of a feed that another process
# follows come every five seconds.
SILENCE_SECONDS = 6.0

# Most requests that wait, for each worker, and most long ones among them: what never ends leaves
# room for the others.
MAX_WAITING = WATCHED_PROMPTS
MAX_LONG = 4

# Time between two requests of one worker that are looked up: while the state of its tokens is not
# known for all their forms, and then.
PAUSE_SECONDS = 0.5
PAUSE_WHILE_PROVED_SECONDS = 5.0

# Longer prompts are not looked up: that takes a microsecond for each ten tokens or so. While a form
# is not proved, they may be longer: coding agents begin with twenty thousand tokens.
MAX_PROMPT_TOKENS = 16_384
MAX_UNPROVED_TOKENS = 65_536


@dataclass(eq=False, slots=True)
class SentRequest:
    """A request in flight to a worker."""

    # The prompt that was sent.
    prompt: Prompt
    # The forms of the prompt.
    forms: int
    # How many tokens of its prompt the worker held before.
    held_tokens: int
    # How many batches its feed had sent by then.
    batches: int
    # When it was sent, in seconds of one monotonic clock.
    sent_at: float
    # Where the index watches for its prompt.
    slot: int = 0
    # The block size for which the index watches, None if it does not watch.
    block_size: int | None = None
    # When it ended, in seconds; None while it lasts.
    ended_at: float | None = None
    # How many batches of its feed had come live by then.
    live_batches: int = 0
    # Whether an answer began that is no failure.
    is_answered: bool = False
    # Whether it has shown already whether its tokens were stored.
    is_shown: bool = False

    def is_long(self, now: float) -> bool:
        """Returns whether it has lasted so long by now, or until its end, that it is long."""
        return (now if self.ended_at is None else self.ended_at) - self.sent_at >= MAX_SECONDS

    def is_over(self, now: float, seconds: float) -> bool:
        """Returns whether it has been over for so many seconds."""
        return self.ended_at is not None and now - self.ended_at >= seconds


def held_tokens(overlap: Overlap | None) -> int:
    """Returns how many tokens of a prompt a worker holds, certain or not, usable or not."""
    return 0 if overlap is None else overlap.held_tokens


class Lookups:
    """The requests of one worker that wait until they are looked up, in the order of sending."""

    def __init__(self) -> None:
        self._waiting: list[SentRequest] = []
        self._next_at = self._next_unproved_at = 0.0

    def __len__(self) -> int:
        """Returns how many requests wait."""
        return len(self._waiting)

    def is_open(self, now: float, *, is_proved: bool) -> bool:
        """Returns whether it is time for one more request.

        is_proved: whether all its forms are proved; others need not wait as long.
        """
        return now >= (self._next_at if is_proved else self._next_unproved_at)

    def has_room(self, now: float) -> bool:
        """Returns whether one more request can wait; if not, it is time for one after a pause."""
        if len(self._waiting) < MAX_WAITING:
            return True
        self._next_at = self._next_unproved_at = now + PAUSE_SECONDS
        return False

    def free_slot(self) -> int:
        """Returns the first slot of the index that no waiting request has; there must be room."""
        taken = {one.slot for one in self._waiting}
        return next(slot for slot in range(MAX_WAITING) if slot not in taken)

    def add(self, sent: SentRequest, *, is_proved: bool) -> None:
        """Adds a request that was just sent. is_proved: whether all its forms are proved."""
        self._waiting.append(sent)
        self._next_at = sent.sent_at + (PAUSE_WHILE_PROVED_SECONDS if is_proved else PAUSE_SECONDS)
        self._next_unproved_at = sent.sent_at + PAUSE_SECONDS

    def put_back(self, sent: SentRequest) -> None:
        """Has a request that was looked up too early wait on."""
        self._waiting.append(sent)

    def drop(self, sent: SentRequest) -> None:
        """Gives up a request; one that does not wait is left as it is."""
        if sent in self._waiting:
            self._waiting.remove(sent)

    def restart(self) -> None:
        """Gives up all requests: the worker lost its blocks. The next one may come at once."""
        self._waiting.clear()
        self._next_at = self._next_unproved_at = 0.0

    def take_due(self, now: float) -> SentRequest | None:
        """Removes and returns one request that is over and can be looked up; None if none is.

        Gives up those that have been over for too long, and the latest of too many long ones.
        """
        kept = [one for one in self._waiting if not one.is_over(now, MAX_SECONDS)]
        extra = [one for one in kept if one.is_long(now)][MAX_LONG:]
        self._waiting = [one for one in kept if one not in extra]
        for sent in self._waiting:
            if sent.is_over(now, GRACE_SECONDS):
                self._waiting.remove(sent)
                return sent
        return None


def may_show(
    prompt: Prompt, overlap: Overlap | None, block_size: int | None, *, is_proved: bool = True
) -> bool:
    """Returns whether a prompt that is sent to a worker can be looked up later.

    overlap: what the worker holds of it. block_size: the worker's, None if unknown. is_proved:
    whether all its forms are proved.
    """
    if len(prompt.tokens) > (MAX_PROMPT_TOKENS if is_proved else MAX_UNPROVED_TOKENS):
        return False
    return block_size is None or usable_tokens(prompt.tokens, block_size) > held_tokens(overlap)


def is_stored(
    sent: SentRequest,
    overlap: Overlap | None,
    batches: int,
    block_size: int | None,
    now: float,
    *,
    was_stored: bool | None,
) -> bool | None:
    """Returns whether a worker stored a prompt whole; None if that is not known.

    overlap: what the worker holds of it now. batches: how many its feed has sent by now.
    block_size: the worker's, None if unknown. was_stored: whether its last block was stored since
    the request was sent; None if that is not known.
    """
    if block_size is None:
        return None
    usable = usable_tokens(sent.prompt.tokens, block_size)
    if usable <= sent.held_tokens:  # its blocks are larger than was known when it was sent
        return None
    if was_stored or held_tokens(overlap) >= usable:
        return True
    says_nothing = batches == sent.batches or sent.is_long(now) or was_stored is None
    return None if says_nothing else False


def has_published(
    sent: SentRequest, live_batches: int, block_size: int, *, is_read: bool
) -> bool | None:
    """Returns whether a worker's feed told anything since a request; None if it need not have.

    live_batches: how many batches of its feed have come live by now. block_size: the worker's.
    is_read: whether anything that its feed ever told could be used.
    """
    if live_batches != sent.live_batches and is_read:
        return True
    is_new = usable_tokens(sent.prompt.tokens, block_size) > sent.held_tokens
    return False if sent.is_answered and is_new else None
