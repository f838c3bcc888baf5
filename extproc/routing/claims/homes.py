"""Homes: the worker to which the last request of each conversation went, and what it holds there.

All of a conversation's later turns will be where it is, so its worker is preferred by some tokens,
but load may still move it. A conversation is found by the end of its last request, which a later
one repeats (`extproc.routing.claims.ends`), or by a name that its client gave it. Names are the
clients' own, so they are keyed with what was asked for, and a client can only move its own
requests.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

import msgspec

from extproc.routing.claims.claim_table import Holdings
from extproc.routing.claims.ends import End, Part, end_key, end_of_tokens, part_of_tokens
from extproc.routing.claims.live_contexts import LIVE_SECONDS, NO_CONTEXT, Context
from extproc.routing.claims.marks import LENGTHS, Marks, root_key, unpacked
from kvstate.overlap import Tokens

# By so many tokens a conversation's worker is preferred beyond what it is expected to hold.
HOME_TOKENS = 1_024.0

# Most conversations that are remembered, the latest: 8 MiB or so.
MOST_HOMES = 65_536

# For how long, in seconds.
HOME_SECONDS = 86_400.0

# So many conversations are taken to have begun and returned before any did, and after so many that
# begun, half of all are forgotten: a burst of thirty that begin changes little, and after a few
# hundred that do not return, none is taken to.
TAKEN_TO_RETURN, MOST_BEGUN = 128.0, 160.0

# Most ends of prompts that are known behind one mark, the latest.
ENDS_OF_MARK = 16


class Turn(msgspec.Struct, frozen=True, gc=False):
    """One request of a conversation.

    keys: under which it is remembered, the one by which its conversation is counted first. follows:
    the key of the conversation's request before it, 0 if none is known. context: what the
    conversation holds on its worker. end: where its prompt ends, if that is known in tokens.
    """

    keys: tuple[int, ...] = ()
    follows: int = 0
    context: Context = NO_CONTEXT
    end: End | None = None


NO_TURN: Turn = Turn()


class _Home(msgspec.Struct, frozen=True, gc=False):
    """Where a request went. is_continued: whether another request has gone on from it."""

    holdings: Holdings
    since: float
    is_counted: bool = False
    context: Context = NO_CONTEXT
    is_continued: bool = False

    @property
    def has_kept_cache(self) -> bool:
        """Whether the worker has kept its cache since."""
        return self.since > self.holdings.lost_at


class Homes:
    """The homes of all conversations, by 64-bit keys; times are seconds of one monotonic clock.

    secret: 64 random bits, the same for routers that share. part: returns the bytes of a part of a
    prompt's tokens.
    """

    def __init__(self, secret: int, most: int = MOST_HOMES, part: Part = part_of_tokens) -> None:
        self._secret = secret
        self._most = most
        self._part = part
        # by the key of the last mark before an end, how long prompts are that end behind it
        self._lengths: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._homes: dict[int, _Home] = {}
        self._begun = self._returned = TAKEN_TO_RETURN

    def __len__(self) -> int:
        """Returns how many conversations are remembered."""
        return len(self._homes)

    def key(self, kind: str, model: str | None, lora: str | None, name: str) -> int:
        """Returns the key of a name of this kind, among the requests for a model and adapter."""
        return root_key(self._secret, kind, model, lora, name)

    def note(self, keys: Iterable[int], holdings: Holdings, now: float) -> None:
        """Notes where requests with these keys belong, without counting a conversation."""
        home = _Home(holdings, now)
        for key in keys:
            self._put(key, home)

    def turn(self, turn: Turn, holdings: Holdings, now: float) -> None:
        """Notes that a conversation's request went to a worker, where the conversation counts.

        It has a key.
        """
        follows, keys, end = turn.follows, turn.keys, turn.end
        before = self._homes.get(follows)
        self._note_return(before, turn)
        if before is not None:
            holdings.contexts.note_return(now, now - before.since, before.context)
        if before is not None and before.is_counted:
            self.pause(follows, is_continued=True)
        if end is not None and end.length:
            self._note_length(end)
        if len(keys) > 1:
            self.note(keys[1:], holdings, now)
        home = _Home(holdings, now, is_counted=True, context=turn.context)
        if home.has_kept_cache:
            holdings.contexts.count(now, turn.context)
        self._put(keys[0], home)

    def pause(self, key: int, *, is_continued: bool = False) -> None:
        """Counts the conversation whose request has this key no longer, until its next one.

        is_continued: whether that is there now.
        """
        before = self._homes.get(key)
        if before is not None and before.is_counted:
            _leave(before)
            self._homes[key] = _Home(
                before.holdings, before.since, context=before.context, is_continued=is_continued
            )

    def _note_return(self, before: _Home | None, turn: Turn) -> None:
        """Counts a conversation that begins, or one that returns for the first time."""
        if turn.keys[0] in self._homes:  # the same request again
            return
        if before is None:
            self._begun += 1
            if self._begun > MOST_BEGUN:
                self._begun, self._returned = self._begun / 2, self._returned / 2
        elif turn.context.has_returned and not before.context.has_returned:
            self._returned += 1

    @property
    def returning(self) -> float:
        """The share of the conversations that return after their first request, of late.

        While few have begun, most of them are taken to do so.
        """
        return min(1.0, self._returned / self._begun)

    def _note_length(self, end: End) -> None:
        """Notes how long a prompt is that ends behind a mark."""
        lengths = self._lengths.pop(end.mark, ())
        if end.length not in lengths:
            lengths = (*lengths[1 - ENDS_OF_MARK :], end.length)
        self._lengths[end.mark] = lengths
        if len(self._lengths) > self._most:
            self._lengths.popitem(last=False)

    def end_of(self, marks: Marks, tokens: Tokens) -> End | None:
        """Returns where a prompt ends; None if it is too short to be found again."""
        return end_of_tokens(marks, tokens, self._part)

    def ends_in(self, marks: Marks, tokens: Tokens) -> Iterator[int]:
        """Yields the keys of the known ends that a prompt may have gone on from, the latest first.

        The ends of other prompts as long as these are among them: their keys are no home's.
        """
        known, count = self._lengths, len(tokens)
        keys = unpacked(marks.keys)
        for place in sorted(map(keys.index, known.keys() & keys), reverse=True):
            for length in reversed(known[keys[place]]):
                if length <= count:
                    yield end_key(keys[place], self._part(tokens, LENGTHS[place], length))

    def grown(self, key: int, tokens: float) -> Context:
        """Returns what the conversation holds whose request has this key, after one of so many.

        Of one that another request has gone on from already, as sub-agents do from one prompt, all
        that it held is shared.
        """
        home = self._homes.get(key)
        before = NO_CONTEXT if home is None else home.context
        if home is None or not home.is_continued:
            return before.grown_to(tokens)
        prefix = min(tokens, before.own + before.shared)
        forked = max(0.0, prefix - before.begun_with)
        return Context(tokens - prefix, prefix, key, has_returned=True, forked=forked)

    def counted(self, key: int, now: float) -> Context | None:
        """Returns what the conversation whose request has this key counts for now, if it does."""
        home = self._homes.get(key)
        if home is None or not home.is_counted or now - home.since >= LIVE_SECONDS:
            return None
        return home.context

    def learn(self, key: int, holdings: Holdings, since: float) -> None:
        """Notes a home of some time ago, unless one is known that is the same, or later."""
        before = self._homes.get(key)
        if before is not None and before.has_kept_cache:
            is_later = before.since < since and before.holdings is not holdings
        else:
            is_later = True
        if is_later:
            self._put(key, _Home(holdings, since))

    def latest(self) -> Iterator[tuple[int, str, float]]:
        """Yields key, worker and time of each home, the one that was noted last first."""
        for key, home in reversed(self._homes.items()):
            if home.has_kept_cache:
                yield key, home.holdings.worker, home.since

    def forget_at(self, keys: Iterable[int], holdings: Holdings) -> None:
        """Forgets those of these conversations whose home is this worker."""
        homes = self._homes
        self.forget([key for key in keys if key in homes and homes[key].holdings is holdings])

    def _put(self, key: int, home: _Home) -> None:
        self.forget((key,))
        self._homes[key] = home
        if len(self._homes) > self._most:
            self.forget((next(iter(self._homes)),))

    def forget(self, keys: Iterable[int]) -> None:
        """Forgets conversations whose request was not computed."""
        for key in keys:
            home = self._homes.pop(key, None)
            if home is not None:
                _leave(home)

    def find_worker(self, keys: Iterable[int], now: float) -> str:
        """Returns the name of the worker at the first key that is known, "" if none is.

        A worker that lost its cache since is no conversation's home.
        """
        return self.find(keys, now)[0]

    def find(self, keys: Iterable[int], now: float) -> tuple[str, int]:
        """Returns the same as `find_worker`, and that key, 0 if none is known."""
        homes = self._homes
        for key in keys:
            home = homes.get(key)
            if home is not None and home.has_kept_cache and now - home.since < HOME_SECONDS:
                return home.holdings.worker, key
        return "", 0


def _leave(home: _Home) -> None:
    """Counts a conversation no longer at its worker; one that lost its cache has forgotten it."""
    if home.is_counted and home.has_kept_cache:
        home.holdings.contexts.forget(home.since, home.context)
