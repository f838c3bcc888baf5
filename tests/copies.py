"""Routers in their own processes that load no modules: forks of a process that has loaded them.

Loading its modules takes a router most of a second, and the tests start about a hundred routers.
`python -m tests.copies SOCKET` loads them once and then forks on each request; a copy runs what
`kvsteer` runs with the same arguments. Tests of how a router starts run the command itself.
"""

import asyncio
import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[1]
MAX_BYTES = 1 << 17


class Copy:
    """A forked process, used like an `asyncio.subprocess.Process`."""

    def __init__(self, life: socket.socket, pid: int) -> None:
        self.pid = pid
        self._life = life
        self._returncode: int | None = None

    @property
    def returncode(self) -> int | None:
        """Its exit status, or the signal that ended it, negative; None while it runs."""
        if self._returncode is None:
            with contextlib.suppress(BlockingIOError):
                self._end(self._life.recv(MAX_BYTES))
        return self._returncode

    async def wait(self) -> int:
        """Returns `returncode` once it has ended."""
        if self._returncode is None:
            self._end(await asyncio.get_running_loop().sock_recv(self._life, MAX_BYTES))
        assert self._returncode is not None
        return self._returncode

    def send_signal(self, number: int) -> None:
        """Sends it a signal; raises ProcessLookupError if it has ended."""
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Ends it, and returns once it has ended."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
            self._life.settimeout(None)
            self._end(self._life.recv(MAX_BYTES))

    def _end(self, told: bytes) -> None:
        # only an original that was killed reports no status, and then its copies are killed, too
        self._returncode = int(told or -signal.SIGKILL)
        self._life.close()


async def started(arguments: Sequence[str], errors: IO[bytes]) -> Copy:
    """Returns a process that runs `kvsteer` with these arguments and this environment.

    errors: its standard error. Its standard input and output are empty.
    """
    life = _asked(arguments, errors, ())
    life.settimeout(0)
    return Copy(life, int(await asyncio.get_running_loop().sock_recv(life, MAX_BYTES)))


def started_at_once(arguments: Sequence[str], errors: IO[bytes], before: Sequence[str]) -> Copy:
    """Does the same as `started`, without an event loop.

    before: what the copy calls first: a module, a function and its arguments.
    """
    life = _asked(arguments, errors, before)
    pid = int(life.recv(MAX_BYTES))
    life.settimeout(0)
    return Copy(life, pid)


def _asked(arguments: Sequence[str], errors: IO[bytes], before: Sequence[str]) -> socket.socket:
    """Requests a copy; returns the socket that delivers its process id and, later, its status."""
    life, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asked = {"arguments": arguments, "environment": dict(os.environ), "before": before}
    with theirs:
        files = [theirs.fileno(), errors.fileno()]
        socket.send_fds(_original(), [json.dumps(asked).encode()], files)
    return life


@functools.cache
def _original() -> socket.socket:
    """Starts the process that is copied, and returns a socket to it; both end with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        number = theirs.fileno()
        command = [sys.executable, "-m", "tests.copies", str(number)]
        null = subprocess.DEVNULL
        original = subprocess.Popen(command, cwd=ROOT, pass_fds=[number], stdin=null, stdout=null)

    def end() -> None:
        ours.close()
        original.wait()

    atexit.register(end)
    return ours


def _serve(asking: socket.socket) -> dict[str, Any] | None:
    """Forks on each request; returns the request in a copy, None in the original at the end."""
    lives: dict[int, socket.socket] = {}
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    sources: list[socket.socket | int] = [asking, reading]
    while True:
        ready, _, _ = select.select(sources, [], [])
        if reading in ready:
            os.read(reading, MAX_BYTES)
            _tell_of_ended(lives)
        if asking not in ready:
            continue
        asked, files, _, _ = socket.recv_fds(asking, MAX_BYTES, 2)
        if not asked:
            for pid in lives:
                os.kill(pid, signal.SIGKILL)
            return None
        life, errors = socket.socket(fileno=files[0]), files[1]
        pid = os.fork()
        if pid:
            lives[pid] = life
            life.send(str(pid).encode())
            os.close(errors)
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(errors, sys.stderr.fileno())
        for one in (asking, life, *lives.values()):
            one.close()
        for number in (reading, writing, errors):
            os.close(number)
        request: dict[str, Any] = json.loads(asked)
        return request


def _tell_of_ended(lives: dict[int, socket.socket]) -> None:
    while lives:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with lives.pop(pid) as life, contextlib.suppress(BrokenPipeError):
            life.send(str(os.waitstatus_to_exitcode(status)).encode())


def _main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started us ends us
    from extproc.__main__ import main
    from extproc.running import event_loop, lifetime, processes  # noqa: F401 - loaded before the fork

    gc.freeze()
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is None:
        return 0
    os.environ.clear()
    os.environ.update(asked["environment"])
    if asked["before"]:
        module, function, *given = asked["before"]
        getattr(importlib.import_module(module), function)(*given)
    return main(asked["arguments"])


if __name__ == "__main__":
    sys.exit(_main())
