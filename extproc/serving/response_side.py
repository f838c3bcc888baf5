"""The response of one ext_proc stream: it goes on unchanged, and its headers are read.

It is no state machine: a response may begin at any time, even before the request has ended, and
whatever comes of it is let through.
"""

from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from extproc.serving import stream_answers as say
from extproc.serving.heads import ResponseHead, response_head_of
from extproc.serving.stream_answers import Answers


class ResponseSide:
    """The response as it passes.

    is_duplex: whether its body comes FULL_DUPLEX_STREAMED, so that every byte is to be given back.
    reads_usage: whether a body that may tell usage is to be shown to us, where Envoy would not.
    head: None until the headers came.
    """

    def __init__(self, *, is_duplex: bool, reads_usage: bool) -> None:
        self.is_duplex = is_duplex
        self.head: ResponseHead | None = None
        self.reads_usage = reads_usage

    def receive(self, kind: str, message: ProcessingRequest) -> Answers:
        """Takes one message of the response.

        kind: which of `response_headers`, `response_body` and `response_trailers` it is.
        """
        if kind == "response_headers":
            return [self._headers(message)]
        if kind == "response_trailers":
            return [say.response_trailers_go_on()]
        if not self.is_duplex:
            return [say.response_body_goes_on()]
        part = message.response_body
        return list(say.response_body_echo(part.body, end_of_stream=part.end_of_stream))

    def _headers(self, message: ProcessingRequest) -> ProcessingResponse:
        self.head = response_head_of(message)
        has_body = not message.response_headers.end_of_stream
        may_tell = self.reads_usage and self.head.is_readable and has_body
        return say.response_headers_go_on(read_body=may_tell and not self.is_duplex)
