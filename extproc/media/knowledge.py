"""What a router knows of media items: their digests, and how many tokens they have."""

from collections import Counter
from collections.abc import Sequence

from extproc.media.averages import Averages
from extproc.requests.media import MediaDigests


class MediaKnowledge:
    """The knowledge of one router. key: at most 64 bytes, the same for routers that share.

    digests: makes the items' digests. averages: of their tokens.
    """

    def __init__(self, key: bytes) -> None:
        self.digests = MediaDigests(key)
        self.averages = Averages()

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
