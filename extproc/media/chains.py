"""Chains: what a worker stored, and how it may be a prompt with media that was sent there.

A chain has the ids of blocks that were stored one after the other, and where items begin in them.
A prompt has texts, items that are known, and holes for those that are not. Where the texts and the
known items of a prompt are in a chain, what stands between them are its other items.
"""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from extproc.media.identities import Identity
from extproc.media.prompts import MediaPrompt
from kvstate.events import BlockHash, BlocksStored
from kvstate.media import ItemStart, beginnings, goes_on, ids_in, padded, plain_keys
from kvstate.overlap import Extra, Tokens

# A chain has at most as many ids; what goes on from there is not followed.
MAX_CHAIN_TOKENS = 262_144

# Most places that are tried as the end of an item: texts have few of the ids by which they begin.
_MAX_ENDS = 64


class Chain(msgspec.Struct, frozen=True, gc=False, eq=False):
    """Blocks that a worker stored one after the other."""

    # The hash of the last block.
    last: BlockHash
    # Whether the first block begins a prompt.
    is_root: bool
    # How many tokens a block has.
    block_size: int
    # The ids of all blocks' tokens, as published.
    tokens: Tokens
    # Where items begin.
    starts: tuple[ItemStart, ...]
    # The adapter of the blocks, None for none.
    lora: str | int | None
    # The keys of the root that name no item.
    salt: Extra
    # The number of its last store, in the order of all.
    number: int

    @classmethod
    def of(cls, event: BlocksStored, number: int) -> "Chain":
        """Returns the chain of one store."""
        begun = beginnings(event) or padded(event.tokens)
        first = event.extras[0] if event.extras else ()
        return cls(
            event.hashes[-1],
            event.parent is None,
            event.block_size,
            event.tokens,
            tuple(begun),
            event.lora,
            plain_keys(first),
            number,
        )

    def extended(self, more: "Chain") -> "Chain | None":
        """Returns the chain that goes on with another one; None if it would be too long."""
        if len(self.tokens) + len(more.tokens) > MAX_CHAIN_TOKENS:
            return None
        shift, reach = len(self.tokens), {}
        for one in self.starts:
            reach[one.at, one.identifier] = one.reach
        for one in more.starts:
            at = one.at + shift
            if not one.at and self._goes_on(more, one):
                at = self.starts[-1].at
            reach[at, one.identifier] = one.reach + shift
        begun = tuple([ItemStart(at, name, end) for (at, name), end in reach.items()])
        return Chain(
            more.last,
            self.is_root,
            self.block_size,
            self.tokens + more.tokens,
            begun,
            self.lora,
            self.salt,
            more.number,
        )

    def _goes_on(self, more: "Chain", begun: ItemStart) -> bool:
        """Returns whether a run of an item's own ids goes on in another chain."""
        if begun.identifier is not None or not self.starts:
            return False
        return goes_on(self.tokens, self.starts[-1], more.tokens)


# What a chain says of the items of a prompt, by their place among them.
Findings = dict[int, Identity]


def findings_in(
    chain: Chain, prompt: MediaPrompt, known: Sequence[Identity | None]
) -> Findings | None:
    """Returns the items of a prompt that a chain shows, or None if it is not that prompt's.

    known: what is known of the items.
    """
    if chain.is_root and chain.salt != (() if prompt.salt is None else (prompt.salt,)):
        return None
    if chain.lora != prompt.lora and isinstance(chain.lora, str | None):
        return None
    for start in _starts_of(chain, prompt, known):
        found = _Walk(chain, prompt, known, start).findings()
        if found is not None:
            return found
    return None


def _starts_of(
    chain: Chain, prompt: MediaPrompt, known: Sequence[Identity | None]
) -> Iterator[int]:
    """Yields where in the prompt a chain may begin."""
    if chain.is_root:
        yield 0
    elif chain.starts:
        size, begun = chain.block_size, chain.starts[0].at
        for place, leads in _places_of_first(chain, prompt, known):
            starts = (place + lead - begun for lead in leads)
            yield from (start for start in starts if start > 0 and start % size == 0)


def _places_of_first(
    chain: Chain, prompt: MediaPrompt, known: Sequence[Identity | None]
) -> Iterator[tuple[int, Iterable[int]]]:
    """Yields where in the prompt the first item of a chain may be, and its possible leads."""
    begun, place = chain.starts[0], 0
    for number, identity in enumerate(known):
        place += len(prompt.texts[number])
        if identity is None:
            yield place, range(len(prompt.written[number]) + 1)
            return
        if identity.identifier == begun.identifier:
            yield place, (_lead_in(chain, identity),)
        if not prompt.items[number].is_exact:
            yield place, range(len(prompt.written[number]) + 1)
        if not identity.is_whole:
            return
        place += identity.count


def _lead_in(chain: Chain, identity: Identity) -> int:
    """Returns how many ids of a known item are before the first item that a chain names."""
    first = chain.starts[0].at
    if identity.identifier is not None or first:
        return identity.lead
    # it begins with the rest of a run
    token, rest = chain.tokens[0], chain.starts[0].reach
    counts = [count for ids, count in identity.runs if token in ids_in(ids)]
    return identity.lead + (counts[0] if counts else rest) - rest


class _Walk:
    """Goes along a prompt and a chain at once. start: where in the prompt the chain begins."""

    def __init__(
        self, chain: Chain, prompt: MediaPrompt, known: Sequence[Identity | None], start: int
    ) -> None:
        self._chain = chain
        self._prompt = prompt
        self._known_items = known
        self._start = start
        self._place = 0
        self._findings: Findings = {}
        self._compared = 0

    @property
    def _at(self) -> int:
        """The place in the chain, negative before its beginning."""
        return self._place - self._start

    @property
    def _is_over(self) -> bool:
        return self._at >= len(self._chain.tokens)

    def findings(self) -> Findings | None:
        """Returns what was found, None if prompt and chain differ."""
        prompt = self._prompt
        if not self._is_same(prompt.texts[0]):
            return None
        for number in range(len(prompt.items)):
            if self._is_over:
                break
            if not self._pass_item(number):
                return None
            if self._is_over or not self._is_ended(number):
                break
            if not self._is_same(prompt.texts[number + 1]):
                return None
        else:
            if any(one.at >= self._at for one in self._chain.starts):
                return None  # it goes on with items behind the prompt
        return self._findings if self._compared else None

    def _is_ended(self, number: int) -> bool:
        identity = self._findings.get(number) or self._known_items[number]
        return identity is not None and identity.is_whole

    def _is_same(self, tokens: Tokens) -> bool:
        """Passes these ids; returns whether the chain has them, as far as it reaches."""
        begin, end = max(0, self._at), min(len(self._chain.tokens), self._at + len(tokens))
        if begin < end:
            if self._chain.tokens[begin:end] != tokens[begin - self._at : end - self._at]:
                return False
            self._compared += end - begin
        self._place += len(tokens)
        return True

    def _pass_item(self, number: int) -> bool:
        """Passes an item; returns whether the chain may have it here."""
        identity = self._known_items[number]
        if identity is not None and self._has(identity):
            if identity.is_whole:
                self._place += identity.count
                return True
            return self._learn(number, identity)
        if identity is not None and self._prompt.items[number].is_exact:
            return False
        return self._learn(number, None)

    def _has(self, identity: Identity) -> bool:
        """Returns whether the chain has a known item here, as far as it reaches."""
        start = self._at + identity.lead
        if 0 <= start < len(self._chain.tokens):
            names = [one.identifier for one in self._chain.starts if one.at == start]
            if names != [identity.identifier]:
                return False
        place = self._place
        is_same = self._is_same(identity.tokens)
        self._place = place
        return is_same

    def _learn(self, number: int, before: Identity | None) -> bool:
        """Learns an item from here on, or where it ends; returns whether it may be one.

        before: its beginning, if that is known.
        """
        chain, at = self._chain, self._at
        if at + (0 if before is None else before.count) < 0:
            return False  # what is between was stored before
        begun = self._begun_at(number, at, before)
        if begun is None:
            # the chain may end before the item does begin
            rest, written = chain.tokens[at:], self._prompt.written[number]
            self._place = self._start + len(chain.tokens)
            return rest == written[: len(rest)]
        lead = begun.at - at
        end = self._end_of(number, begun.at, lead)
        if end is None and not self._may_go_on(number, begun):
            return False
        stop = len(chain.tokens) if end is None else end
        tokens = chain.tokens[max(0, at) : stop]
        if at < 0 and before is not None:
            tokens = before.tokens[:-at] + tokens
        made = Identity.of(begun.identifier, tokens, lead, is_whole=end is not None)
        if made is None:
            return False
        if before is None or made.count >= before.count:
            self._findings[number] = made
        self._place += made.count
        return True

    def _begun_at(self, number: int, at: int, before: Identity | None) -> ItemStart | None:
        """Returns where the own ids begin of an item that starts at a place of the chain.

        Those before them are the template's: of a pair of marks around an item, for instance.
        """
        if before is not None:
            here = at + before.lead
            reach = max([one.reach for one in self._chain.starts if one.at == here], default=0)
            return ItemStart(here, before.identifier, reach)
        found = [one for one in self._chain.starts if one.at >= at]
        lead = found[0].at - at if found else 0
        written = self._prompt.written[number]
        is_own = lead <= len(written) and self._chain.tokens[at : at + lead] == written[:lead]
        return found[0] if found and is_own else None

    def _may_go_on(self, number: int, begun: ItemStart) -> bool:
        """Returns whether an item may go on behind the chain: its last block has nothing else."""
        tokens, written = self._chain.tokens, self._prompt.written[number]
        if begun.identifier is None:
            reach = max([one.reach for one in self._chain.starts])
            return {*written}.issuperset(tokens[reach:])
        if begun.reach < len(tokens):
            return False
        last = max(begun.at, len(tokens) - self._chain.block_size)
        return {*tokens[max(0, begun.at) : last], *written}.issuperset(tokens[last:])

    def _end_of(self, number: int, begun: int, lead: int) -> int | None:
        """Returns where an item ends in the chain, None if the chain ends first.

        It ends where the next text begins, or the next item if there is none between.
        """
        text = self._prompt.texts[number + 1]
        if len(text):
            return self._place_of(text, max(0, begun + 1))
        following = [one.at - lead for one in self._chain.starts if one.at > begun]
        return following[0] if following and number + 1 < len(self._prompt.items) else None

    def _place_of(self, text: Tokens, at: int) -> int | None:
        tokens = self._chain.tokens
        for _ in range(_MAX_ENDS):
            try:
                at = tokens.index(text[0], at)
            except ValueError:
                return None
            if tokens[at : at + len(text)] == text[: len(tokens) - at]:
                return at
            at += 1
        return None
