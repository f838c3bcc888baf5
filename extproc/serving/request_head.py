"""The head of a request, from the message of the proxy that has its headers.

`extproc/native/decoder.c` makes most heads, and leaves to this module what it is not sure of.
"""

from collections.abc import Mapping, Sequence

from extproc.base import headers
from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingRequest
from extproc.requests.request import Head, path_of
from extproc.routing.eligibility import subset_of
from extproc.serving.naming_headers import NO_NAMES, NamingHeaders
from extproc.serving.proxy_message import ProxyMessage

# Most decimal digits of a content-length (64 bits).
_LENGTH_DIGITS = 19


def head_of(
    message: ProxyMessage,
    policy_header: str | None,
    naming: NamingHeaders = NO_NAMES,
) -> Head:
    """Returns the parts of a request's headers on which its treatment depends.

    policy_header: the header that may name a policy, in lower case; None without one.
    """
    texts = message.headers
    path, length = texts.get(":path"), texts.get("content-length")
    subset = None if message.context is None else _subset(message.context)
    is_named = not naming.all.isdisjoint(texts)
    return Head(
        texts.get(":method", ""),
        "" if path is None else path_of(path),
        None if length is None else number_of(length, _LENGTH_DIGITS),
        None if policy_header is None else texts.get(policy_header),
        subset,
        _first(texts, naming.session) if is_named else "",
        _first(texts, naming.conversation) if is_named else "",
        texts.get(headers.REQUEST_ID, "")[: headers.MAX_ID_LETTERS],
        texts.get(headers.TRACEPARENT, "")[: headers.MAX_ID_LETTERS],
        _encoding_in(texts.get("content-encoding", "")),
    )


def _encoding_in(written: str) -> str:
    encoding = written.strip().lower()
    return "" if encoding == "identity" else encoding


def _first(named: Mapping[str, str], headers: Sequence[str]) -> str:
    """Returns the first of these headers that is not empty, "" if all are."""
    for header in headers:
        text = named.get(header)
        if text:
            return text
    return ""


def _subset(context: ProcessingRequest) -> frozenset[str] | None:
    """Returns the endpoints that the proxy's hint allows, None without a hint."""
    if not context.HasField("metadata_context"):
        return None
    namespace = context.metadata_context.filter_metadata.get(headers.SUBSET_NAMESPACE)
    if namespace is None or headers.SUBSET not in namespace.fields:
        return None
    hint = namespace.fields[headers.SUBSET]
    if hint.WhichOneof("kind") == "list_value":
        return subset_of([each.string_value for each in hint.list_value.values])
    return subset_of(hint.string_value)


def number_of(text: str, digits: int) -> int | None:
    """Returns a number that is written in at most so many digits; None of another text."""
    is_number = text.isascii() and text.isdigit() and len(text) <= digits
    return int(text) if is_number else None
