"""The messages by which a new router gets the rows of the index from another one.

    the new router                          any other one
    RowsAsk(number), again and again        RowsOffer(number, offer or None)
    RowsTake(offer, at), again and again    RowsPiece(offer, at, total, data)

They are sealed as `extproc.sharing.messages` says, under a magic number of their own, so that
routers of older releases skip them. All but the first have an address, the number under which its
receiver waits for it, in clear before the rest of the body: so the others do not read them, though
there may be thousands. The data is a state file (`kvstate.rows`) without a secret: routers
that share one have the same. Both numbers are random, so that a recorded message is of no use
later.
"""

from typing import Annotated

import msgspec

from extproc.sharing.messages import SEALED_FROM, Keys, MessageError, sealed, unsealed
from kvstate.undecodable import UNDECODABLE

MAGIC = b"KVR\x02"

# Bytes of rows in one message.
PIECE_BYTES = 48 * 1024

# The most rows that a router sends or takes: some 12 million blocks.
MAX_BYTES = 256 * 1024 * 1024

TO_ALL = 0
_ADDRESS_BYTES = 8

_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Place = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]
_Layout = Annotated[str, msgspec.Meta(max_length=64)]
_Data = Annotated[bytes, msgspec.Meta(min_length=1, max_length=PIECE_BYTES)]


class RowsAsk(msgspec.Struct, frozen=True, array_like=True, tag="ask"):
    """Asks who has rows. layout: of the asking router's core."""

    number: _Number
    layout: _Layout


class RowsOffer(msgspec.Struct, frozen=True, array_like=True, tag="offer"):
    """Offers rows to the router that asked with this number; None: there are none to give yet."""

    number: _Number
    offer: _Number | None


class RowsTake(msgspec.Struct, frozen=True, array_like=True, tag="take"):
    """Takes up an offer: asks for the piece that begins at this byte."""

    offer: _Number
    at: _Place


class RowsPiece(msgspec.Struct, frozen=True, array_like=True, tag="piece"):
    """A piece of the rows. total: how many bytes there are in all."""

    offer: _Number
    at: _Place
    total: _Place
    data: _Data


RowsMessage = RowsAsk | RowsOffer | RowsTake | RowsPiece

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RowsMessage)


def is_about_rows(wire: bytes) -> bool:
    """Returns whether a message claims to be one of these."""
    return wire.startswith(MAGIC)


def address_of(wire: bytes) -> int:
    """Returns the number under which the receiver of a message waits for it, or `TO_ALL`.

    Nobody has checked yet who sent it: it may only be used to read no more of it.
    """
    return int.from_bytes(wire[SEALED_FROM : SEALED_FROM + _ADDRESS_BYTES], "little")


def encoded(message: RowsMessage, keys: Keys, tag: bytes) -> bytes:
    """Returns a message as bytes, from the sender with this tag."""
    if isinstance(message, RowsAsk):
        address = TO_ALL
    else:
        address = message.number if isinstance(message, RowsOffer) else message.offer
    body = address.to_bytes(_ADDRESS_BYTES, "little") + _encoder.encode(message)
    return sealed(body, keys, tag, MAGIC)


def decoded(wire: bytes, keys: Keys) -> RowsMessage:
    """Returns a received message; the bytes may be anything.

    Raises:
        MessageError: it is not from this fleet, or malformed.
    """
    try:
        message: RowsMessage = _decoder.decode(unsealed(wire, keys, MAGIC)[_ADDRESS_BYTES:])
    except UNDECODABLE:
        raise MessageError("malformed") from None
    return message
