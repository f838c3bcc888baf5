"""HTTP/2 (RFC 9113) and gRPC framing for one kind of peer, a proxy: bytes in, events and bytes out.

Pure: a session knows no socket and no clock. `extproc.serving.lean_server` drives it.
"""
