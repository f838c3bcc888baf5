"""What both servers have to do with addresses and sizes."""

import asyncio
import contextlib
import os
import resource
import socket
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from extproc import address
from extproc.config import Config
from extproc.config.schema import ExtProc
from extproc.errors import StartError

# What a message carries besides the body: headers, which Envoy limits to 60 KiB by default.
_MESSAGE_OVERHEAD_BYTES = 1024 * 1024

# Asked after a minute without a byte, every ten seconds, six times: two minutes.
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6))

_ALL_RIGHTS = 0o777


# Shares of the files that may be open: proxies' connections; those of each HTTP server of ours. The
# rest is for feeds, questions to workers and files.
_PROXIES_SHARE = 3 / 4
_HTTP_SHARE = 1 / 16


def raise_file_limit() -> tuple[int, int]:
    """Raises the limit of open files to what the system lets this process have; before, now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def proxy_connections() -> int:
    """How many connections of proxies leave files for everything else."""
    return _share(_PROXIES_SHARE)


def http_connections() -> int:
    """How many connections one of our HTTP servers may have at once."""
    return min(256, _share(_HTTP_SHARE))


def _share(share: float) -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return max(1, int(limit * share)) if limit != resource.RLIM_INFINITY else sys.maxsize


def max_message_bytes(config: Config) -> int:
    """Room for Envoy's largest body: a longer one than we read is still answered, by load."""
    limit = max(config.extproc.max_body_bytes, config.envoy.request_body_buffer_limit_bytes)
    return limit + _MESSAGE_OVERHEAD_BYTES


def keep_alive(transport: asyncio.BaseTransport) -> None:
    """Has the system find out that the other machine is gone: nobody else would, while a response
    takes its time."""
    connected = transport.get_extra_info("socket")
    if connected is not None and connected.family != socket.AF_UNIX:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEP_ALIVE:
            connected.setsockopt(socket.IPPROTO_TCP, option, value)


def socket_path(options: ExtProc) -> Path | None:
    """Where the Unix socket is to be, None for a host and a port."""
    if not options.listen.startswith(address.UNIX_PREFIX):
        return None
    # gRPC also writes unix:///absolute/path.
    return Path(options.listen.removeprefix(address.UNIX_PREFIX).removeprefix("//"))


@contextlib.contextmanager
def place_for(path: Path, options: ExtProc) -> Iterator[None]:
    """For binding a Unix socket: nothing is there, and its rights are right from the start.

    Raises:
        StartError: the path is taken.
    """
    remove_stale_socket(path)
    before = os.umask(_ALL_RIGHTS & ~int(options.socket_mode, 8))
    try:
        yield
    finally:
        os.umask(before)


def bound_socket(path: Path, options: ExtProc) -> socket.socket:
    """A Unix socket at a path.

    Raises:
        StartError: the path is taken.
        OSError: it cannot be there.
    """
    with place_for(path, options):
        made = socket.socket(socket.AF_UNIX)
        try:
            made.bind(str(path))
        except OSError:
            made.close()
            raise
    return made


def cannot_listen(options: ExtProc, error: OSError) -> StartError:
    """Why the address cannot be had, in the system's words."""
    # asyncio puts words of its own around them; a name that is not found has a negative number
    number = error.errno or 0
    why = os.strerror(number) if number > 0 else error.strerror or str(error)
    return StartError(f"extproc.listen: cannot listen on {options.listen}: {why}")


def try_address(options: ExtProc) -> None:
    """Listens for a moment, to learn why somebody else cannot.

    Raises:
        OSError: why.
        StartError: the path is taken.
    """
    path = socket_path(options)
    if path is not None:
        bound_socket(path, options).close()
        path.unlink()
        return
    host, port = address.parse(options.listen)
    for family, kind, proto, _, place in socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        with socket.socket(family, kind, proto) as made:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(place)
            made.listen()


def remove_stale_socket(path: Path) -> None:
    """Removes a socket that a killed router left behind; never one that is served, nor a file.

    Raises:
        StartError: the path is taken.
    """
    try:
        if not stat.S_ISSOCK(path.stat().st_mode):
            raise StartError(f"extproc.listen: {path} is there already and is no socket")
        with socket.socket(socket.AF_UNIX) as probe:
            if probe.connect_ex(str(path)) == 0:
                raise StartError(f"extproc.listen: another server listens on {path}")
        path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise StartError(f"extproc.listen: {path}: {error.strerror}") from None
