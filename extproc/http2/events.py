"""What a connection tells of its streams."""

from typing import NamedTuple

from extproc.http2.request_head import RequestHead


class Opened(NamedTuple):
    """A request began; is_whole: nothing follows its head."""

    stream_id: int
    head: RequestHead
    is_whole: bool


class Received(NamedTuple):
    """More of a request's DATA, which may be empty at its end; is_last: it is whole now.

    What is used of it is to be told by `Connection.consume`.
    """

    stream_id: int
    data: bytes | memoryview
    is_last: bool


class Aborted(NamedTuple):
    """A stream is over before both sides ended it, by the peer or for its fault."""

    stream_id: int


Event = Opened | Received | Aborted
