"""What a media item is, as it is told to other routers and kept in the state file.

Engines name items by texts, or by their own ids; one that is named by bytes is not told.
"""

from typing import Annotated, Self

import msgspec

from extproc.media.identities import MAX_IDENTIFIER_LETTERS, MAX_RUNS, MAX_TOKENS, Identity
from extproc.requests.media import DIGEST_BYTES
from kvstate.media import TURNS

_Key = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
# Engines' names are hashes of 64 letters, or names that callers gave.
_Identifier = (
    Annotated[str, msgspec.Meta(max_length=MAX_IDENTIFIER_LETTERS)]
    | Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
)
_Token = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_TokenCount = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
# msgspec 0.22 reads past the end of a tuple of fixed length that is in a union with a bounded
# number, when garbage is collected.
_Turns = Annotated[tuple[_Token, ...], msgspec.Meta(min_length=TURNS, max_length=TURNS)]
_RunIds = _Token | _Turns
_Runs = Annotated[
    tuple[tuple[_RunIds, _TokenCount], ...], msgspec.Meta(min_length=1, max_length=MAX_RUNS)
]
_Lead = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOKENS)]


class ItemReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a media item is to engines; see `extproc.media.identities.Identity`.

    key: of its model, adapter, processor arguments and digest.
    """

    key: _Key
    identifier: _Identifier | None
    runs: _Runs
    lead: _Lead = 0

    @classmethod
    def of(cls, key: bytes, identity: Identity) -> Self | None:
        """Returns the news of an item that is known to its end; None for another one."""
        name = identity.identifier
        if not identity.is_whole or isinstance(name, bytes):
            return None
        return cls(key, name, identity.runs, identity.lead)

    @property
    def identity(self) -> Identity:
        """What the item is."""
        return Identity(self.identifier, self.runs, self.lead)

    @property
    def is_sound(self) -> bool:
        """Whether it has as many tokens as an item may have, and its lead is within them."""
        return self.lead < sum([count for _, count in self.runs]) <= MAX_TOKENS
