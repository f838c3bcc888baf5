"""A router whose terminal is closed stops; with `kill -HUP` it reads its file again."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import yaml

from kvtools.simulator.settings import TINY_MODEL
from tests.ports import free_port
from tests.waiting import blocked_until


def started(directory: Path, terminal: int) -> tuple["subprocess.Popen[bytes]", Path]:
    ports = {
        name: {"listen": f"127.0.0.1:{free_port()}"} for name in ("extproc", "admin", "metrics")
    }
    models = [{"name": "tiny", "tokenizer": str(TINY_MODEL)}]
    content = {**ports, "models": models, "workers": [{"endpoint": "127.0.0.1:9"}]}
    (directory / "kvsteer.yaml").write_text(yaml.safe_dump(content))
    log = directory / "log"
    command = [sys.executable, "-m", "extproc", "serve", str(directory / "kvsteer.yaml")]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=terminal, stdout=out, stderr=out, start_new_session=True
        )
    blocked_until(lambda: b"serving ext_proc" in log.read_bytes(), "the router serves")
    return process, log


def test_router_stops_with_its_terminal_and_reloads_without(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process, log = started(tmp_path, theirs)
    try:
        os.close(theirs)
        process.send_signal(signal.SIGHUP)
        blocked_until(lambda: b"read again" in log.read_bytes(), "it reads its file again")
        assert process.poll() is None
        os.close(ours)  # the terminal is gone; its shell sends SIGHUP
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
