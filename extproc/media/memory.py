"""What outlives a restart of the router of the media items that it knows.

Their keys are digests by a secret, so what was saved is only used with the same secret. An item
that is another one to a newer engine costs nothing: no worker holds blocks of the old one.
"""

import logging
from collections.abc import Iterator

import msgspec

from extproc.media.identities import MAX_RUNS
from extproc.media.item_report import ItemReport
from extproc.media.knowledge import MediaKnowledge
from kvstate.undecodable import decode_saved

log = logging.getLogger("kvsteer.state")

# Most items of one piece, and most runs: encoded in well under a millisecond.
ITEMS_AT_ONCE = 256
RUNS_AT_ONCE = MAX_RUNS

_TAG_OF = b"the secret of the state file"


class _Piece(msgspec.Struct, frozen=True, array_like=True):
    """Some items. tag: of the secret."""

    tag: bytes
    items: tuple[ItemReport, ...]


_decoder = msgspec.msgpack.Decoder(_Piece)


class MediaMemory:
    """Keeps the media items that are known to their end, the latest used last."""

    section = "media"
    version = 1

    def __init__(self, knowledge: MediaKnowledge) -> None:
        self._identities = knowledge.identities
        self._tag = knowledge.digests.of(_TAG_OF)
        self._is_foreign = False

    def saved(self) -> Iterator[bytes]:
        """Yields the items that are known now, some at a time, as bytes."""
        some: list[ItemReport] = []
        runs = 0
        for key in self._identities.ordered_keys():
            identity = self._identities.look_at(key)
            news = None if identity is None else ItemReport.of(key, identity)
            if news is None:
                continue
            if len(some) == ITEMS_AT_ONCE or runs + len(news.runs) > RUNS_AT_ONCE:
                yield self._encoded(some)
                some, runs = [], 0
            some.append(news)
            runs += len(news.runs)
        yield self._encoded(some)

    def _encoded(self, items: list[ItemReport]) -> bytes:
        return msgspec.msgpack.encode(_Piece(self._tag, tuple(items)))

    def restore(self, contents: bytes) -> None:
        """Takes what was saved.

        Raises:
            ValueError: it is no such thing.
        """
        piece = decode_saved(_decoder, contents)
        if not all(one.is_sound for one in piece.items):
            raise ValueError("no engine has such media")
        if piece.tag != self._tag:
            self._pass_over()
            return
        for one in piece.items:
            self._identities.put(one.key, one.identity)

    def _pass_over(self) -> None:
        if not self._is_foreign:
            log.info("state.file: its media are not used: their digests have another secret")
        self._is_foreign = True

    def note_proven(self, worker: str) -> None:
        """Does nothing: what an item is does not depend on a worker."""
