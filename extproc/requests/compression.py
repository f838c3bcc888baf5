"""Tells whether a body is compressed: engines refuse it, and no prompt is read in it.

The remedy is a decompressor before ext_proc (Envoy's `envoy.filters.http.decompressor`), which
removes the header, too. gRPC names compression in its own frame (`grpc_request`).
"""

import re

# The reason for such bodies.
COMPRESSED = "unsupported_compression"

# How gzip (RFC 1952), zstd (RFC 8878) and zlib (RFC 1950, which HTTP calls "deflate") begin; Brotli
# has no such mark. No JSON begins so, in any encoding.
_BEGINNING = re.compile(rb"\x1f\x8b|\x28\xb5\x2f\xfd|\x78[\x01\x5e\x9c\xda]")


def is_compressed(body: bytes, encoding: str) -> bool:
    """Returns whether a body that is no JSON is compressed.

    encoding: its content-encoding, "" without one.
    """
    return bool(encoding) or _BEGINNING.match(body) is not None
