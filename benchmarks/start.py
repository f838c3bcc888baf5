"""The cost of starting a router, from the command to ready, and its memory then.

    python benchmarks/start.py [--quick] [--json FILE]

Each start is a process of `kvsteer serve`, with one worker and the tiny model, until /readyz
answers ready. CPU is that of the whole process; seconds are meaningful only on an idle machine. The
reference is a process that imports aiohttp's server and does nothing. Bytecode is compiled before,
as at an installation by pip, even where PYTHONDONTWRITEBYTECODE is set.
"""

import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from measure import Figure, Goal, Row
from rows import arguments, run

ROOT = Path(__file__).resolve().parents[1]
FULL_STARTS, QUICK_STARTS = 15, 5
PORTS = (19002, 19090, 19091)
PATIENCE_SECONDS = 30.0

CONFIG = f"""\
models: [{{name: tiny, tokenizer: {ROOT}/kvtools/simulator/tiny_model}}]
workers: [{{endpoint: "127.0.0.1:18001"}}]
extproc: {{listen: "127.0.0.1:{PORTS[0]}"}}
admin: {{listen: "127.0.0.1:{PORTS[1]}"}}
metrics: {{listen: "127.0.0.1:{PORTS[2]}"}}
"""

# The largest part of a start: only importing the library of its HTTP servers.
REFERENCE = """
import os, sys, time
from aiohttp import web
pages = int(open("/proc/self/statm").read().split()[1])
resident = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
print(time.process_time(), resident, len(sys.modules))
"""

SECONDS, CPU = "start to ready (s)", "start to ready, CPU (s)"
RESIDENT, MODULES = "resident when ready (MiB)", "modules imported"
GOALS = {SECONDS: Goal(1.0, "< 1 s, idle machine", of_ratio=False)}


def start(config: Path) -> Mapping[str, float]:
    """Measures one start."""
    command = [sys.executable, "-m", "extproc", "serve", "--config", str(config)]
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
    try:
        while not _is_ready():
            if process.poll() is not None or time.perf_counter() - began > PATIENCE_SECONDS:
                sys.exit("the router did not start; are the ports 19002, 19090 and 19091 free?")
            time.sleep(0.005)
        seconds = time.perf_counter() - began
        resident = _resident_mib(process.pid)
        return {SECONDS: seconds, CPU: _cpu_seconds(process.pid), RESIDENT: resident}
    finally:
        process.terminate()
        process.wait()


def _is_ready() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORTS[2]}/readyz", timeout=1):
            return True
    except (OSError, urllib.error.URLError):
        return False


def _cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def reference() -> Mapping[str, float]:
    """Measures importing only aiohttp's server."""
    began = time.perf_counter()
    cpu, resident, modules = map(float, _said(REFERENCE).split())
    return {
        SECONDS: time.perf_counter() - began,
        CPU: cpu,
        RESIDENT: resident,
        MODULES: modules,
    }


def _modules() -> float:
    return float(_said("import extproc.running.lifetime, sys; print(len(sys.modules))"))


def _said(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def main() -> None:
    """Measures all and prints the table."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # compiling doubles the CPU of a start
    with run(arguments(__doc__, "fewer starts")) as one, tempfile.TemporaryDirectory() as directory:
        config = Path(directory) / "kvsteer.yaml"
        config.write_text(CONFIG)
        start(config)  # compiles bytecode that is missing
        rounds = one.amount(1, QUICK_STARTS, FULL_STARTS)
        both = [({**start(config), MODULES: _modules()}, reference()) for _ in range(rounds)]
        one.add(
            Row(
                f"{what}; reference: import aiohttp.web",
                Figure([ours[what] for ours, _ in both]),
                Figure([theirs[what] for _, theirs in both]),
                GOALS.get(what),
            )
            for what in (SECONDS, CPU, RESIDENT, MODULES)
        )


if __name__ == "__main__":
    main()
