"""Which calls' messages a session reads, and by what."""

from typing import NamedTuple

from extproc._core import Decoder


class MethodDecoder(NamedTuple):
    """The messages of the calls on a path are read by a decoder, unless they come in parts."""

    path: bytes
    decoder: Decoder
