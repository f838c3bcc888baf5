"""Which process listens on a TCP port of this machine, as Linux tells in /proc (see proc(5))."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_PROC = Path("/proc")
_LISTENING = "0A"  # the kernel's number of the state

# The columns of /proc/net/tcp, and how many characters of a command are shown.
_LOCAL, _STATE, _SOCKET = 1, 3, 9
_SHOWN = 80


class PortHolder(NamedTuple):
    """A process, with the beginning of its command line."""

    pid: int
    command: str

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command})"


def holder_of(port: int) -> PortHolder | None:
    """Returns the process that listens on a port; None if there is none, or it is not to be seen.

    The processes of other users are not to be seen, except by root; nor is any without /proc.
    """
    wanted = {f"socket:[{number}]" for number in _sockets_at(port)}
    for process in _PROC.glob("[0-9]*") if wanted else ():
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if any(str(file.readlink()) in wanted for file in (process / "fd").iterdir()):
                return PortHolder(int(process.name), _command_of(process))
    return None


def _sockets_at(port: int) -> Iterator[str]:
    """Yields the numbers of the sockets that listen on a port."""
    for table in ("net/tcp", "net/tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / table).read_text().splitlines()[1:]:
                columns = line.split()
                at = int(columns[_LOCAL].rpartition(":")[2], 16)
                if at == port and columns[_STATE] == _LISTENING:
                    yield columns[_SOCKET]


def _command_of(process: Path) -> str:
    """Returns what the process says of itself, made printable."""
    words = (process / "cmdline").read_bytes()[: _SHOWN * 4].decode(errors="replace")
    text = "".join(one if one.isprintable() else " " for one in words).strip()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ..."
