"""The coding agents that tests/clients run, from npm at pinned versions.

    python -m tests.clients.install

Needs npm. Installs all of them, unless they are there already: about a gigabyte. They go to
~/.cache/kvsteer/clients, or to the folder that KVSTEER_CLIENTS names. No script of a package runs.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple


class Package(NamedTuple):
    """A package of npm, and where its program is below the folder of packages."""

    name: str
    version: str
    program: str


PACKAGES = {
    "claude-code": Package(
        "@anthropic-ai/claude-code", "2.1.197", "@anthropic-ai/claude-code-*/claude"
    ),
    "codex": Package("@openai/codex", "0.169.0", ".bin/codex"),
    "opencode": Package("opencode-ai", "1.18.33", "opencode-*/bin/opencode"),
    "qwen-code": Package("@qwen-code/qwen-code", "0.15.10", ".bin/qwen"),
}


class MissingError(LookupError):
    """A program is not there; the message says what to do."""


def folder() -> Path:
    """The folder of the packages."""
    named = os.environ.get("KVSTEER_CLIENTS")
    return Path(named) if named else Path.home() / ".cache/kvsteer/clients"


def program(name: str) -> Path:
    """Path of a client's program.

    Raises:
        MissingError: it is not installed, or in another version.
    """
    package = PACKAGES[name]
    how = "python -m tests.clients.install"
    if shutil.which("node") is None:
        raise MissingError(f"{name} needs node on PATH")
    modules = folder() / "node_modules"
    about = modules / package.name / "package.json"
    if not about.exists() or json.loads(about.read_text())["version"] != package.version:
        raise MissingError(f"{package.name} {package.version} is not in {folder()}: {how}")
    found = sorted(modules.glob(package.program))
    if not found:
        raise MissingError(f"{package.name} has no program for this machine in {folder()}")
    return found[0]


def main() -> int:
    """Installs all clients and prints where each one is; 1 if any is missing afterwards."""
    npm = shutil.which("npm")
    if npm is None:
        sys.stderr.write("npm is not on PATH\n")
        return 1
    folder().mkdir(parents=True, exist_ok=True)
    wanted = [f"{one.name}@{one.version}" for one in PACKAGES.values()]
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder())]
    done = subprocess.run([npm, "install", *options, *wanted], check=False)
    for name in PACKAGES:
        try:
            sys.stdout.write(f"{name}: {program(name)}\n")
        except MissingError as error:
            sys.stderr.write(f"{error}\n")
            return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
