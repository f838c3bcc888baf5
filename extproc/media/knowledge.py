"""What a router knows of media items: their digests, their identities, and how long they are.

An image has as many token ids as the engine's processor makes of it, and the ids that count in its
block hashes are the engine's own. Nobody computes either here: both are learned from what workers
store for requests (`learning`, `chains`), and kept by the digest of what the client sent
(`identities`). A prompt with media is keyed up to its first unknown item, and weighed by averages
behind it (`averages`).

This folder may know prompts' ids and stored blocks. It knows no worker's load and decides nothing;
all but the clock that it is given is pure.

The rule: an item counts as known only while one explanation of the stored blocks is left. Two that
fit teach nothing, and a contradiction makes an item unknown again.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from extproc.media.averages import Averages
from extproc.media.identities import Identities
from extproc.media.learning import MediaLearning
from extproc.media.prompts import FilledPrompt, MediaPrompt, filled
from extproc.requests.media import MediaDigests
from extproc.requests.prompt import MediaPart
from extproc.tokenizing.media_parts import MediaParts
from kvstate.media import MediaIds

_sorted = msgspec.msgpack.Encoder(order="sorted")


def _never() -> float:
    return 0.0


class MediaKnowledge:
    """The knowledge of one router.

    key: at most 64 bytes, the same for routers that share. media_ids: those of the index.
    monotonic: returns seconds. digests: makes the items' digests. averages: of their tokens.
    identities: what they are to engines. learning: learns that.
    """

    def __init__(
        self, key: bytes, media_ids: MediaIds | None = None, monotonic: Callable[[], float] = _never
    ) -> None:
        self.digests = MediaDigests(key)
        self.averages = Averages()
        self.identities = Identities()
        self.learning = MediaLearning(self.identities, monotonic)
        self._media_ids = media_ids or MediaIds(0)

    def prompt(
        self,
        parts: MediaParts,
        media: Sequence[MediaPart],
        namespace: tuple[str, str | None, str | None],
        arguments: Mapping[str, Any],
        *,
        has_own_ids: bool = False,
    ) -> MediaPrompt:
        """Returns a prompt with media.

        parts: its ids. media: its items as the client wrote them. namespace: model, adapter, salt.
        arguments: how the engine is to read the items. has_own_ids: as in MediaPrompt.
        """
        model, lora, salt = namespace
        items = tuple([self.digests.item(part, kind) for kind, part in media])
        root = self.digests.of(_sorted.encode((model, lora, arguments)))
        keys = tuple([self.digests.of(root + item.digest) for item in items])
        return MediaPrompt(model, lora, salt, parts.texts, parts.written, items, keys, has_own_ids)

    def filled(self, prompt: MediaPrompt) -> FilledPrompt:
        """Returns a prompt with its items, up to the first that is not known."""
        is_split = self.learning.splits.is_proved(prompt.model)
        return filled(prompt, self.identities.find, self._media_ids, is_split=is_split)

    def note_usage(
        self, model: str, kinds: Sequence[str], media_tokens: int | None, others: float | None
    ) -> None:
        """Notes what an engine reports of a request with media.

        kinds: of its items. media_tokens: what they have together, None if it is not reported.
        others: else, how many of its tokens are about those of all items.
        """
        tokens = media_tokens if media_tokens is not None else others
        if tokens is not None and tokens > 0:
            self.averages.note(model, Counter(kinds), tokens)
