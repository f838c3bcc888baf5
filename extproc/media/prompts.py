"""Prompts with media: the ids of their texts, and the places of their items between them."""

from array import array
from collections.abc import Callable

import msgspec

from extproc.media.identities import Identity
from extproc.requests.media import Item
from kvstate.media import MediaIds
from kvstate.overlap import Tokens

# More tokens than any engine takes; what is behind them is not keyed.
MAX_PROMPT_TOKENS = 4 * 1024 * 1024


class MediaPrompt(msgspec.Struct, frozen=True, gc=False, eq=False):
    """The prompt of a request with media, as its template writes it."""

    # This and the next two: as in `Prompt`.
    model: str
    lora: str | None
    salt: str | None
    # The ids before, between and behind the items.
    texts: tuple[Tokens, ...]
    # What the template writes for each item, in whose place the engine puts its own ids.
    written: tuple[Tokens, ...]
    # The media items, in order.
    items: tuple[Item, ...]
    # The keys of the items in the table of identities.
    keys: tuple[bytes, ...]
    # Whether the engine tells items apart by their ids, as SGLang does.
    has_own_ids: bool = False

    @property
    def may_depend(self) -> bool:
        """Whether what its items are may depend on which others there are; see `splitting`."""
        return self.has_own_ids and len(set(self.keys)) > 1


class FilledPrompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt as far as its items are known.

    tokens: its ids, folded, and one or two of what follows if that is not known. identities: of its
    items, None where one is not known. sure_tokens: how many of the ids hold for certain, None for
    all. text_tokens: those before the first item. known_tokens: how many ids are known. is_whole:
    whether all of the prompt is.
    """

    tokens: Tokens
    identities: tuple[Identity | None, ...]
    sure_tokens: int | None
    text_tokens: int
    known_tokens: int
    is_whole: bool


def filled(
    prompt: MediaPrompt,
    find: Callable[[bytes], Identity | None],
    media_ids: MediaIds,
    *,
    is_split: bool = False,
) -> FilledPrompt:
    """Returns a prompt with its items in their places, up to the first that is not known.

    is_split: whether it is known that an item does not depend on the others.
    """
    identities = tuple(map(find, prompt.keys))
    tokens = array("I", prompt.texts[0])
    text_tokens = len(tokens)
    sure: int | None = None
    for number, identity in enumerate(identities):
        start = len(tokens)
        is_sure = prompt.items[number].is_exact and (is_split or not prompt.may_depend)
        if sure is None and not is_sure:
            sure = start
        if identity is None or start + identity.count > MAX_PROMPT_TOKENS:
            # the mark before it is the template's, and one more id stands for what follows
            tokens.extend(prompt.written[number][:2])
            return FilledPrompt(tokens, identities, sure, text_tokens, start, is_whole=False)
        tokens.extend(identity.tokens)
        if identity.identifier is not None and start + identity.lead < len(tokens):
            at = start + identity.lead
            tokens[at] = media_ids.token(identity.identifier, tokens[at])
        if not identity.is_whole:
            known = len(tokens)
            tokens.append(identity.next_token)
            return FilledPrompt(tokens, identities, sure, text_tokens, known, is_whole=False)
        tokens.extend(prompt.texts[number + 1])
    return FilledPrompt(tokens, identities, sure, text_tokens, len(tokens), is_whole=True)
