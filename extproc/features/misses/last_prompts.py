"""The last prompt of each conversation, by which its next one is judged.

A conversation is found by the end of its last prompt, which its next one repeats
(`extproc.routing.claims.ends`). If its beginning has changed, that end is not in the next one: then
it is found by the session that its client names, or by one of its first turns, and only if what its
last prompt says is found in the next one.

The ids of a prompt take four bytes a token, and are mostly those by which the tokenizer remembers
it. What is kept is bounded in bytes; the conversation that was silent for longest is dropped first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from extproc.features.misses.sender import NOBODY, Sender
from kvstate.overlap import Tokens

# Memory of a conversation besides its tokens, and of each key under which it is found (measured).
CONVERSATION_BYTES = 600
_KEY_BYTES = 150
BYTES_PER_TOKEN = 4

# Under a session or a turn, so many conversations are known at most, the latest.
MOST_ALIKE = 16

# Of a conversation, so many ends of prompts are known at most, the latest: requests may go on from
# an earlier one, as sub-agents do.
MOST_ENDS = 4


class Sent(msgspec.Struct, eq=False, gc=False):
    """Where a prompt went.

    worker: the one that answered. at: when, in seconds of the loads' clock. is_stored: whether it
    may have stored the prompt; False if the request failed.
    """

    worker: str
    at: float
    is_stored: bool = True


class LastPrompt(msgspec.Struct, eq=False):
    """The last prompt of one conversation.

    number: its own, from 1. tokens: its ids. sent: where it went. sender: who asks. whose: 64 bits
    of what its conversations have in common. turns: how many requests of the conversation have been
    seen. conversation: the number of the conversation's first one. older: the number of the
    conversation's one before, with other tools or another system; 0 for none: clients ask for a
    title or a summary in between, and go on as before. has_tools: whether it has any, None if that
    is not known. session: the name of its session, 0 for none. ends: the keys of the ends of its
    last prompts. names: see `LastPrompts.note_names`.
    """

    number: int
    tokens: Tokens
    sent: Sent
    sender: Sender = NOBODY
    whose: int = 0
    turns: int = 1
    conversation: int = 0
    older: int = 0
    has_tools: bool | None = None
    session: int = 0
    ends: tuple[int, ...] = ()
    names: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        """The memory that it takes."""
        keys = len(self.ends) + len(self.names)
        return CONVERSATION_BYTES + BYTES_PER_TOKEN * len(self.tokens) + _KEY_BYTES * keys


class LastPrompts:
    """The last prompts of one router's conversations.

    max_bytes: for all. dropped: how many conversations were dropped for want of memory.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._latest: OrderedDict[int, LastPrompt] = OrderedDict()
        # by the key of a prompt's end: the conversation, and how many tokens that prompt had
        self._by_end: dict[int, tuple[int, int]] = {}
        self._by_name: dict[int, tuple[int, ...]] = {}
        self._numbers = 0
        self.bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        """Returns how many conversations are known."""
        return len(self._latest)

    def ended_by(self, key: int) -> tuple[LastPrompt, int] | None:
        """Returns the conversation that has a prompt with this end, and the tokens of that prompt.

        They are fewer than those of its last prompt if it has gone on since.
        """
        found = self._by_end.get(key)
        return None if found is None else (self._latest[found[0]], found[1])

    def find_alike(self, names: Iterable[int]) -> Iterator[LastPrompt]:
        """Yields the conversations with one of these names, each once, the latest of each first."""
        seen: set[int] = set()
        for name in names:
            for number in reversed(self._by_name.get(name, ())):
                if number not in seen:
                    seen.add(number)
                    yield self._latest[number]

    def begin(self, last: LastPrompt, key: int = 0) -> LastPrompt:
        """Remembers a conversation whose first prompt this is; gives it its number.

        key: of the prompt's end, 0 if that is not known.
        """
        self._numbers += 1
        last.number = self._numbers
        last.conversation = last.conversation or last.number
        self._latest[last.number] = last
        self.bytes += last.size_bytes
        if key:
            self._note_end(last, key)
        self._shrink()
        return last

    def change(self, last: LastPrompt, key: int, older: LastPrompt) -> None:
        """Remembers the next prompt of a conversation beside its last one, with other tools.

        Of one conversation, two are remembered.
        """
        last.conversation, last.older = older.conversation, older.number
        last.session, last.turns = older.session, older.turns + 1
        oldest, older.older = self._latest.get(older.older), 0
        if oldest is not None:
            self._drop(oldest)
        self.begin(last, key)

    def go_on(self, last: LastPrompt, tokens: Tokens, sent: Sent, key: int) -> None:
        """Notes the next prompt of a conversation. key: of its end, 0 if that is not known."""
        number = last.number
        if number not in self._latest:
            return
        self.bytes += BYTES_PER_TOKEN * (len(tokens) - len(last.tokens))
        last.tokens, last.sent = tokens, sent
        last.turns += 1
        self._latest.move_to_end(number)
        if key:
            self._note_end(last, key)
        if self.bytes > self._max_bytes:
            self._shrink()

    def _note_end(self, last: LastPrompt, key: int) -> None:
        """Notes where the last prompt of a conversation ends."""
        ends, number = last.ends, last.number
        self._by_end[key] = number, len(last.tokens)
        if key in ends:
            return
        last.ends = (*ends[1 - MOST_ENDS :], key)
        if len(ends) == MOST_ENDS:
            self._drop_end(ends[0], number)
        else:
            self.bytes += _KEY_BYTES

    def note_names(self, last: LastPrompt, names: Sequence[int]) -> None:
        """Notes under which names a conversation is found from now on: its session, its turns."""
        if last.number not in self._latest:
            return
        for name in set(last.names) - set(names):
            self._drop_name(name, last.number)
        before = last.size_bytes
        last.names = tuple(dict.fromkeys(names))
        self.bytes += last.size_bytes - before
        for name in last.names:
            alike = [one for one in self._by_name.get(name, ()) if one != last.number]
            self._by_name[name] = (*alike[1 - MOST_ALIKE :], last.number)
        self._shrink()

    def _shrink(self) -> None:
        while self.bytes > self._max_bytes and self._latest:
            self._drop(next(iter(self._latest.values())))
            self.dropped += 1

    def _drop(self, last: LastPrompt) -> None:
        del self._latest[last.number]
        self.bytes -= last.size_bytes
        for key in last.ends:
            self._drop_end(key, last.number)
        for name in last.names:
            self._drop_name(name, last.number)

    def _drop_end(self, key: int, number: int) -> None:
        if self._by_end.get(key, (0, 0))[0] == number:
            del self._by_end[key]

    def _drop_name(self, name: int, number: int) -> None:
        left = tuple([one for one in self._by_name.get(name, ()) if one != number])
        if left:
            self._by_name[name] = left
        else:
            self._by_name.pop(name, None)
