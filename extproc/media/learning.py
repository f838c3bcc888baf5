"""Learns what media items are from the blocks that workers store for the requests that bring them.

A request whose items are not all known waits for what its worker stores. A chain of stored blocks
is that of a request if their texts and known items agree. Several requests may be as alike as that:
then nothing is learned until only one request and one chain are left for each other. So a chain
that was stored before a request was sent is never its own, and one that another request has taken
is not, either.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from extproc.media.chains import Chain, Findings, findings_in
from extproc.media.identities import Identities, Identity
from extproc.media.prompts import MediaPrompt
from extproc.media.splitting import Splits, shows_split
from kvstate.events import BlockHash, BlocksStored
from kvstate.media import FIRST_PAD, has_media

# Events may arrive after the answer; SGLang stores at a request's end. Seconds.
GRACE_SECONDS = 2.0
# A request that takes longer is given up.
MAX_SECONDS = 300.0

# Most requests that wait, for each worker, and chains that may be one's own; and most chains and
# ids that are kept, of all workers.
MAX_WAITING = 64
MAX_CHAINS = 1_024
MAX_MATCHES = 64
MAX_KEPT_TOKENS = 4 * 1024 * 1024


def _report_to_nobody(_: bytes, __: Identity) -> None:
    pass


class WaitingRequest:
    """A request that waits for what its worker stores.

    until: when it is given up, in seconds of one monotonic clock. since: the number of the last
    store before it. is_known: whether all of its items are known for certain, so that it only
    waits so that no other request takes what is stored for it. before: what was known of its items
    when it was sent. matches: the chains that may be its own, by the numbers of their last stores,
    and what they say. learned: which of its items were learned from them, and what they are.
    """

    __slots__ = ("before", "is_known", "learned", "matches", "prompt", "since", "until", "worker")

    def __init__(
        self,
        worker: str,
        prompt: MediaPrompt,
        before: Sequence[Identity | None],
        since: int,
        until: float,
        *,
        is_known: bool,
    ) -> None:
        self.worker = worker
        self.prompt = prompt
        self.before = before
        self.since = since
        self.until = until
        self.is_known = is_known
        self.matches: dict[int, Findings] = {}
        self.learned: Findings = {}


class MediaLearning:
    """Learns items for one router.

    monotonic: returns seconds. report: is called with what is learned, by its key. splits: of which
    models an item does not depend on the others of its request.
    """

    def __init__(self, identities: Identities, monotonic: Callable[[], float]) -> None:
        self.report: Callable[[bytes, Identity], None] = _report_to_nobody
        self.splits = Splits()
        self._identities = identities
        self._monotonic = monotonic
        self._waiting: dict[str, list[WaitingRequest]] = {}
        self._by_prompt: dict[MediaPrompt, WaitingRequest] = {}
        self._chains: OrderedDict[tuple[str, BlockHash], Chain] = OrderedDict()
        self._stored_tokens = 0
        self._number = 0

    def begin(self, worker: str, prompt: MediaPrompt, *, is_known: bool = False) -> None:
        """Has a request that is sent to a worker wait for what that stores.

        is_known: whether all of its items are known for certain.
        """
        now = self._monotonic()
        self._give_up(worker, now)
        others = self._waiting.setdefault(worker, [])
        if len(others) >= MAX_WAITING:
            self._drop(others[0])
        before, until = self._identities_of(prompt), now + MAX_SECONDS
        waiting = WaitingRequest(worker, prompt, before, self._number, until, is_known=is_known)
        self._waiting.setdefault(worker, []).append(waiting)
        self._by_prompt[prompt] = waiting

    def end(self, prompt: MediaPrompt) -> None:
        """Notes that a request is over: its events are there soon."""
        waiting = self._by_prompt.get(prompt)
        if waiting is not None:
            waiting.until = self._monotonic() + GRACE_SECONDS

    def drop(self, prompt: MediaPrompt) -> None:
        """Notes that a request's worker did not compute it."""
        waiting = self._by_prompt.get(prompt)
        if waiting is not None:
            self._drop(waiting)

    @property
    def is_idle(self) -> bool:
        """Whether no request waits to learn."""
        return not self._waiting

    def listens(self, worker: str) -> bool:
        """Returns whether a request waits to learn from what a worker stores."""
        if worker not in self._waiting:
            return False
        self._give_up(worker, self._monotonic())
        return any(not one.is_known for one in self._waiting.get(worker, ()))

    def hear(self, worker: str, event: BlocksStored) -> None:
        """Takes a store of a worker."""
        before = None if event.parent is None else self._chains.get((worker, event.parent))
        waiting = self._waiting.get(worker, [])
        if before is None and not waiting and not has_media(event):
            return
        self._number += 1
        chain = Chain.of(event, self._number)
        chain = (before and before.extended(chain)) or chain
        self._keep(worker, chain)
        if not all(one.is_known for one in waiting):
            self._match(chain, list(waiting))
            self._settle(waiting)

    def _match(self, chain: Chain, waiting: Sequence[WaitingRequest]) -> None:
        """Notes for which requests a chain may have been stored."""
        known = [one for one in waiting if one.is_known]
        if any(self._findings(chain, one) is not None for one in known):
            return
        learners = [one for one in waiting if not one.is_known]
        is_matched = False
        for one in learners:
            found = self._findings(chain, one)
            if found is None:
                continue
            is_matched = True
            if found:
                one.matches[chain.number] = found
                self._see_split(chain, one, found)
            if len(one.matches) > MAX_MATCHES:
                _forget_chains(waiting, (next(iter(one.matches)),))
        if not is_matched:
            for one in learners:
                if one.learned and self._contradicts(chain, one):
                    self._unlearn(one)
                elif len(waiting) == 1 and one.prompt.may_depend and _differs(chain, one):
                    self.splits.refute(one.prompt.model)

    def _see_split(self, chain: Chain, one: WaitingRequest, found: Findings) -> None:
        """Notes that a prompt's items do not depend on each other, if a chain of it shows that."""
        if one.prompt.may_depend and not self.splits.is_proved(one.prompt.model):
            own = {token for token in chain.tokens if token >= FIRST_PAD}
            if shows_split(one.before, [made.name for made in found.values()], own):
                self.splits.prove(one.prompt.model)

    def _identities_of(self, prompt: MediaPrompt) -> Sequence[Identity | None]:
        return tuple(map(self._identities.find, prompt.keys))

    def _findings(self, chain: Chain, one: WaitingRequest) -> Findings | None:
        found = findings_in(chain, one.prompt, self._identities_of(one.prompt))
        if found is None:
            return None
        keys = one.prompt.keys
        names = {(keys[number], made.name) for number, made in found.items()}
        return found if len(names) == len({key for key, _ in names}) else None

    def _contradicts(self, chain: Chain, one: WaitingRequest) -> bool:
        """Returns whether a chain is as like a request as the one that it learned from, with other
        items: then either may be its own.
        """
        found = findings_in(chain, one.prompt, one.before) or {}
        return any(
            identity.name != one.learned[number].name
            for number, identity in found.items()
            if number in one.learned
        )

    def _settle(self, waiting: Sequence[WaitingRequest]) -> None:
        """Learns each item that only one name is left for, which is left for no other item."""
        is_changed = True
        while is_changed:
            is_changed = False
            for one in waiting:
                is_changed |= bool(one.matches) and self._learn_sole(one, waiting)

    def _learn_sole(self, one: WaitingRequest, waiting: Sequence[WaitingRequest]) -> bool:
        """Learns the items of a request that are settled; returns whether there are any."""
        keys, is_changed = one.prompt.keys, False
        for number in sorted({number for found in one.matches.values() for number in found}):
            options = {
                chain: found[number]
                for chain, found in one.matches.items()
                if number in found and self._is_open(found[number].name, keys[number], waiting)
            }
            if len({made.name for made in options.values()}) == 1:
                longest = max(options.values(), key=_length)
                if any(_is_sole(chain, keys[number], longest.name, waiting) for chain in options):
                    is_changed |= self._learn(one, number, longest)
        return is_changed

    def _is_open(self, name: object, key: bytes, waiting: Sequence[WaitingRequest]) -> bool:
        """Returns whether no other item was learned by a name."""
        return not any(
            made.name == name and other.prompt.keys[number] != key
            for other in waiting
            for number, made in other.learned.items()
        )

    def _learn(self, one: WaitingRequest, number: int, made: Identity) -> bool:
        if one.learned.get(number) == made:
            return False
        one.learned[number] = made
        self._put(one.prompt.keys[number], made)
        return True

    def _put(self, key: bytes, made: Identity) -> None:
        self._identities.put(key, made)
        self.report(key, made)

    def _unlearn(self, one: WaitingRequest) -> None:
        for key in one.prompt.keys:
            self._identities.drop(key)
        self._drop(one)

    def _keep(self, worker: str, chain: Chain) -> None:
        key = (worker, chain.last)
        before = self._chains.pop(key, None)
        self._stored_tokens += len(chain.tokens) - (0 if before is None else len(before.tokens))
        self._chains[key] = chain
        while len(self._chains) > MAX_CHAINS or self._stored_tokens > MAX_KEPT_TOKENS:
            _, oldest = self._chains.popitem(last=False)
            self._stored_tokens -= len(oldest.tokens)

    def _give_up(self, worker: str, now: float) -> None:
        for one in [one for one in self._waiting.get(worker, ()) if one.until <= now]:
            self._drop(one)

    def _drop(self, waiting: WaitingRequest) -> None:
        self._by_prompt.pop(waiting.prompt, None)
        others = self._waiting[waiting.worker]
        others.remove(waiting)
        # what may have been its own is not left for others now
        _forget_chains(others, tuple(waiting.matches))
        if not others:
            del self._waiting[waiting.worker]

    def count(self, prompt: MediaPrompt, whole: int) -> None:
        """Notes how many tokens an engine counted of a prompt.

        If one item of it is not known to its end, it has the rest of them, as its template closes
        it. If all are known and are not as many, they are forgotten.
        """
        known = self._identities_of(prompt)
        left = whole - sum(map(len, prompt.texts))
        left -= sum([one.count for one in known if one is not None])
        if all(one is not None and one.is_whole for one in known):
            if left:
                for key in prompt.keys:
                    self._identities.drop(key)
            return
        open_ones = {key for key, one in zip(prompt.keys, known, strict=True) if not _is_whole(one)}
        if len(open_ones) == 1 and left > 0:
            self._close(prompt, open_ones.pop(), left)

    def _close(self, prompt: MediaPrompt, key: bytes, left: int) -> None:
        """Completes an item with as many of its ids as are left, and what the template adds."""
        identity = self._identities.find(key)
        places = [number for number, one in enumerate(prompt.keys) if one == key]
        if identity is None or len(places) > 1:
            return
        token = identity.next_token
        behind = list(prompt.written[places[0]])[::-1]
        closing = behind[: behind.index(token)][::-1] if token in behind else []
        if identity.identifier is None or left < len(closing) or token not in behind:
            return
        tokens = identity.tokens
        tokens.extend([token] * (left - len(closing)) + closing)
        made = Identity.of(identity.identifier, tokens, identity.lead, is_whole=True)
        if made is not None:
            self._put(key, made)


def _differs(chain: Chain, one: WaitingRequest) -> bool:
    """Returns whether a chain is like a prompt whose known items are others."""
    found = findings_in(chain, one.prompt, [None] * len(one.before)) or {}
    known = [(one.before[number], made) for number, made in found.items()]
    return any(before is not None and before.name != made.name for before, made in known)


def _is_sole(chain: int, key: bytes, name: object, waiting: Sequence[WaitingRequest]) -> bool:
    """Returns whether a chain says of one item alone that it has a name."""
    return not any(
        made.name == name and one.prompt.keys[number] != key
        for one in waiting
        for number, made in one.matches.get(chain, {}).items()
    )


def _forget_chains(waiting: Sequence[WaitingRequest], chains: Sequence[int]) -> None:
    for one in waiting:
        for chain in chains:
            one.matches.pop(chain, None)


def _length(identity: Identity) -> tuple[int, bool]:
    return identity.count, identity.is_whole


def _is_whole(identity: Identity | None) -> bool:
    return identity is not None and identity.is_whole
