import pytest

from extproc.http2.header_blocks import head_of

REQUEST = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/a/b")]


def test_head_of_reads_a_request() -> None:
    more = [
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        (b"grpc-encoding", b"gzip"),
        (b"content-length", b"12"),
    ]
    head = head_of([*REQUEST, *more])
    assert head is not None
    assert (head.method, head.path, head.encoding) == (b"POST", b"/a/b", b"gzip")
    assert (head.content_type, head.content_length) == (b"application/grpc", 12)
    assert head.is_request
    assert not head.is_trailers


def test_trailers_have_no_pseudo_headers() -> None:
    head = head_of([(b"x", b"y")])
    assert head is not None
    assert head.is_trailers
    assert not head.is_request
    assert head.content_length is None


@pytest.mark.parametrize("missing", range(3))
def test_request_needs_method_scheme_and_path(missing: int) -> None:
    head = head_of([one for number, one in enumerate(REQUEST) if number != missing])
    assert head is not None
    assert not head.is_request
    assert not head.is_trailers


def test_path_must_not_be_empty() -> None:
    head = head_of([*REQUEST[:2], (b":path", b"")])
    assert head is not None
    assert not head.is_request


@pytest.mark.parametrize(
    "field",
    [
        (b":path", b"/again"),
        (b":status", b"200"),
        (b"Upper", b"x"),
        (b"", b"x"),
        (b"a b", b"x"),
        (b"a:b", b"x"),
        (b"caf\xc3\xa9", b"x"),
        (b"connection", b"close"),
        (b"transfer-encoding", b"chunked"),
        (b"te", b"gzip"),
        (b"x", b"a\r\nb"),
        (b"x", b"a\0"),
        (b"x", b" a"),
        (b"content-length", b"-1"),
        (b"content-length", b"9" * 20),
    ],
)
def test_malformed_fields_make_the_head_malformed(field: tuple[bytes, bytes]) -> None:
    assert head_of([*REQUEST, field]) is None


def test_pseudo_headers_must_come_first() -> None:
    assert head_of([(b"x", b"y"), *REQUEST]) is None
