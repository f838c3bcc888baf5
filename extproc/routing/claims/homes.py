"""Homes: the worker to which the last request of each conversation went.

While tokens are not known, a conversation is worth more on its worker than its texts show, since
all of its later turns will be there. So its worker is preferred by some tokens, but load may still
move it. A conversation is found by the end of its last request, which a later one repeats, or by a
name that its client gave it. Names are the clients' own, so they are keyed with what was asked for,
and a client can only move its own requests.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from extproc.routing.claims.claim_table import Holdings
from extproc.routing.claims.marks import KEY_BYTES, Marks, root_key, unpacked

# By so many tokens a conversation's worker is preferred beyond what it is expected to hold.
HOME_TOKENS = 1_024.0

# Most conversations that are remembered, the latest: 8 MiB or so.
MOST_HOMES = 65_536

# For how long, in seconds.
HOME_SECONDS = 86_400.0

# Makes the key of a conversation's end another one than its mark's.
_END = 0x9E3779B97F4A7C15


class _Home(msgspec.Struct, frozen=True, gc=False):
    holdings: Holdings
    since: float
    is_counted: bool = False

    @property
    def has_kept_cache(self) -> bool:
        """Whether the worker has kept its cache since."""
        return self.since > self.holdings.lost_at


class Homes:
    """The homes of all conversations, by 64-bit keys; times are seconds of one monotonic clock.

    secret: 64 random bits, the same for routers that share.
    """

    def __init__(self, secret: int, most: int = MOST_HOMES) -> None:
        self._secret = secret
        self._most = most
        self._homes: dict[int, _Home] = {}

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

    def turn(self, keys: Sequence[int], follows: int, holdings: Holdings, now: float) -> None:
        """Notes that a conversation's request went to a worker, where the conversation counts now.

        keys: of the request, the one by which its conversation is counted first. follows: the key
        of the conversation's request before it, 0 if there is none.
        """
        before = self._homes.get(follows)
        if before is not None and before.is_counted:
            _leave(before)
            self._homes[follows] = _Home(before.holdings, before.since)
        self.note(keys[1:], holdings, now)
        for key in keys[:1]:
            home = _Home(holdings, now, is_counted=True)
            if home.has_kept_cache:
                holdings.conversations.count(now)
            self._put(key, home)

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
        home.holdings.conversations.forget(home.since)


def end_of(marks: Marks) -> tuple[int, ...]:
    """Returns the key of a conversation's end, none if it is too short to have one."""
    return tuple([key ^ _END for key in unpacked(marks.keys[-KEY_BYTES:])])


def ends_in(marks: Marks) -> Sequence[int]:
    """Returns the keys of all ends that a conversation may have had before, the latest first."""
    return [key ^ _END for key in reversed(unpacked(marks.keys))]
