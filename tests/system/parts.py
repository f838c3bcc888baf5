"""Processes that can be killed, stopped, continued and restarted, each with a log."""

import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from extproc.base import address
from tests.waiting import blocked_until

START_SECONDS = 60.0
STOP_SECONDS = 15.0
TAIL_BYTES = 4_000


class Part:
    """One process; it is up when this can be reached: a URL that answers 200, or ip:port."""

    def __init__(self, name: str, command: Sequence[str], log: Path, reached_at: str) -> None:
        self.name = name
        self._command = list(command)
        self._log = log
        self._reached_at = reached_at
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    @property
    def runs(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def is_sound(self) -> bool:
        """Whether it runs and is not stopped."""
        return self.runs and not self._is_stopped

    def log_lines(self) -> list[str]:
        """What it has logged."""
        return self._log.read_text(errors="replace").splitlines()

    def start(self) -> None:
        """Starts it, without waiting until it can be reached."""
        assert not self.runs
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self._is_stopped = False

    def wait(self) -> None:
        """Returns once it can be reached."""

        def is_reached() -> bool:
            self.check()
            return self.is_there()

        try:
            blocked_until(is_reached, f"{self.name} is there", seconds=START_SECONDS)
        except AssertionError as error:
            error.add_note(self._tail())
            raise

    def check(self) -> None:
        """Fails, with the end of its log, if it has ended."""
        assert self.runs, f"{self.name} has ended: {self._tail()}"

    def is_there(self) -> bool:
        """Whether it can be reached now."""
        if not self._reached_at.startswith("http://"):
            host, port = address.parse(self._reached_at)
            with socket.socket() as probe:
                probe.settimeout(1)
                return probe.connect_ex((host, port)) == 0
        try:
            with urllib.request.urlopen(self._reached_at, timeout=1) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def kill(self) -> None:
        """SIGKILL, as a crash or a lack of memory ends a process."""
        self._end(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM, as an orderly stop begins."""
        self._end(signal.SIGTERM)

    def stop(self) -> None:
        """SIGSTOP: its sockets stay open, and nothing is answered."""
        assert self._process
        self._process.send_signal(signal.SIGSTOP)
        self._is_stopped = True

    def go_on(self) -> None:
        """SIGCONT."""
        assert self._process
        self._process.send_signal(signal.SIGCONT)
        self._is_stopped = False

    def _end(self, number: signal.Signals) -> None:
        if self._process is None or self._process.poll() is not None:
            return
        if self._is_stopped:
            self.go_on()
        self._process.send_signal(number)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tail(self) -> str:
        return self._log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
