"""No key, password or shared secret appears in what a router tells, even when it crashes."""

import asyncio
import contextlib
import signal
import sys
from asyncio.subprocess import DEVNULL, Process
from pathlib import Path

import aiohttp
import pytest
import trustme
import yaml

from tests.ports import free_port
from tests.system.attacks.test_discretion import ADMIN
from tests.waiting import until

# At a load of thirty a start and the first answers take a minute.
PATIENCE_SECONDS = 500.0

SECRET, PASSWORD = "c4narybird-of-the-fleet", "c4narybird-of-the-engine"


async def echoing_engine(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answers the greeting with an error that quotes all of it, password included."""
    with contextlib.suppress(OSError):
        said = await reader.read(4096)
        writer.write(b"-ERR not understood: " + said.replace(b"\r\n", b" ") + b"\r\n")
        await writer.drain()
    writer.transport.abort()


def configuration(folder: Path, ports: dict[str, int]) -> Path:
    """A router with every secret that one may have."""
    issued = trustme.CA().issue_cert("127.0.0.1")
    files = {name: folder / name for name in ("tls.crt", "tls.key", "secret", "password")}
    files["tls.crt"].write_bytes(issued.cert_chain_pems[0].bytes())
    files["tls.key"].write_bytes(issued.private_key_pem.bytes())
    files["secret"].write_text(SECRET)
    files["password"].write_text(PASSWORD)
    listen = {name: f"127.0.0.1:{port}" for name, port in ports.items()}
    tls = {"certificate": str(files["tls.crt"]), "key": str(files["tls.key"])}
    written = {
        "log": {"level": "debug"},
        "extproc": {"listen": listen["extproc"], "tls": tls},
        "admin": {"listen": listen["admin"]},
        "metrics": {"listen": listen["metrics"]},
        "models": [{"name": "m"}],
        "workers": [{"endpoint": "127.0.0.1:1"}],
        "sharing": {
            "url": f"redis://{listen['engine']}",
            "secret_file": str(files["secret"]),
            "password_file": str(files["password"]),
        },
        "recorder": {"file": str(folder / "record.jsonl")},
    }
    file = folder / "kvsteer.yaml"
    file.write_text(yaml.safe_dump(written))
    return file


async def pages(ports: dict[str, int]) -> str:
    """All pages of both HTTP servers."""
    found = []
    async with aiohttp.ClientSession() as session:
        for port in (ports["admin"], ports["metrics"]):
            for path in ADMIN:
                async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                    found.append(await answer.text())
    return "\n".join(found)


def canaries(folder: Path) -> list[str]:
    """The secrets, and the lines of the key's body."""
    key = (folder / "tls.key").read_text().splitlines()
    return [SECRET, PASSWORD, SECRET.encode().hex(), *(line for line in key if "-" not in line)]


def command_line(pid: int) -> str:
    """What everybody on the machine can see of a process."""
    return Path(f"/proc/{pid}/cmdline").read_text()


async def logged(log: Path, words: str, process: Process) -> None:
    """Waits until a router has logged some words, however slow the machine is."""
    looks_seconds = 0.05  # the router needs the time more
    await until(
        lambda: words in log.read_text() or process.returncode is not None,
        words,
        seconds=PATIENCE_SECONDS,
        pause=looks_seconds,
    )
    assert process.returncode is None, log.read_text()


@pytest.mark.parametrize("end", [signal.SIGABRT, signal.SIGSEGV, signal.SIGTERM])
async def test_router_output_contains_no_secret_even_after_a_crash(
    end: signal.Signals, tmp_path: Path
) -> None:
    ports = {name: free_port() for name in ("extproc", "admin", "metrics", "engine")}
    file, log = configuration(tmp_path, ports), tmp_path / "log"
    secrets = canaries(tmp_path)
    engine = await asyncio.start_server(echoing_engine, "127.0.0.1", ports["engine"])
    command = [sys.executable, "-X", "faulthandler", "-m", "extproc", "serve", "--config"]
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *command, str(file), stdin=DEVNULL, stdout=errors, stderr=errors
        )
    try:
        await logged(log, "serving ext_proc on", process)
        await logged(log, "not understood", process)  # the engine has quoted
        (tmp_path / "tls.key").write_text("\n".join(["-----BEGIN PRIVATE KEY-----", *secrets]))
        process.send_signal(signal.SIGHUP)  # a key that cannot be read is told
        await logged(log, "extproc.tls", process)  # the fault is told
        told = await pages(ports) + command_line(process.pid)
        process.send_signal(end)
        await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        engine.close()
    told += log.read_text(errors="replace")
    assert ("Current thread" in told) == (end is not signal.SIGTERM)
    assert "***" in told  # the password that the engine quoted
    assert [one for one in secrets if one in told] == []
