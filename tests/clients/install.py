"""The coding agents that tests/clients run, from npm and PyPI.

    python -m tests.clients.install

Needs npm. Installs those that are pinned, unless they are there already: about two gigabytes. They
go to ~/.cache/kvsteer/clients, or to the folder that KVSTEER_CLIENTS names, each to a folder of its
own. No script of a package runs. `tests.clients.newest` installs all of them in their newest
releases.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple


class Package(NamedTuple):
    """A package, and where its program is below its folder of packages.

    version: the release that is pinned, "" if only the newest one is tried. program: "" for a
    library of Python.
    """

    name: str
    version: str = ""
    program: str = ""

    @property
    def is_of_python(self) -> bool:
        """Whether it is a library from PyPI."""
        return not self.program


_ARCHITECTURE = {"x86_64": "x64", "aarch64": "arm64"}.get(platform.machine(), "x64")

# The Node.js that runs the clients: some of them need a newer one than distributions have.
NODE = Package(f"node-linux-{_ARCHITECTURE}", "22.23.3", f"node-linux-{_ARCHITECTURE}/bin/node")

PACKAGES: Mapping[str, Package] = {
    "claude-code": Package(
        "@anthropic-ai/claude-code", "2.1.332", "@anthropic-ai/claude-code-*/claude"
    ),
    "codex": Package("@openai/codex", "0.171.0", ".bin/codex"),
    "opencode": Package("opencode-ai", "1.18.33", "opencode-*/bin/opencode"),
    "qwen-code": Package("@qwen-code/qwen-code", "0.24.4", ".bin/qwen"),
    "pi": Package("@earendil-works/pi-coding-agent", "1.6.0", ".bin/pi"),
    "copilot": Package("@github/copilot", "1.0.102", ".bin/copilot"),
    "cline": Package("cline", program=".bin/cline"),
    "continue": Package("@continuedev/cli", program=".bin/cn"),
    "grok": Package("@vibe-kit/grok-cli", program=".bin/grok"),
    "kimi-code": Package("@moonshot-ai/kimi-code", program=".bin/kimi"),
    "openai-agents": Package("openai-agents"),
    "pydantic-ai": Package("pydantic-ai-slim[openai,anthropic]"),
    "langchain": Package("langchain[openai,anthropic]"),
    "smolagents": Package("smolagents[openai]"),
    "openai of Python": Package("openai"),
    "anthropic of Python": Package("anthropic"),
    "openai of Node": Package("openai", program="openai/index.mjs"),
    "anthropic of Node": Package("@anthropic-ai/sdk", program="@anthropic-ai/sdk/index.mjs"),
}
PINNED = [name for name, package in PACKAGES.items() if package.version]


HOW = "`python -m tests.clients.install` (or `make clients`) installs it"


class MissingError(LookupError):
    """A program is not there; the message says what to do."""


def folder() -> Path:
    """The folder of the packages."""
    named = os.environ.get("KVSTEER_CLIENTS")
    return Path(named) if named else Path.home() / ".cache/kvsteer/clients"


class Installed:
    """Clients in a folder. is_newest: whether they are the newest releases, not the pinned ones."""

    def __init__(self, at: Path, *, is_newest: bool = False) -> None:
        self._folder = at
        self._is_newest = is_newest

    def program(self, client: str) -> Path:
        """Path of a client's program; for a library of Python, of an interpreter that has it.

        Raises:
            MissingError: it is not installed, or in another version.
        """
        package = PACKAGES[client]
        if package.is_of_python:
            python = self._folder / client / "bin/python"
            if not python.exists():
                raise MissingError(f"{package.name} is not in {self._folder}: {HOW}")
            return python
        self.node()
        return self._program_of(client, package)

    def node(self) -> Path:
        """Path of the installed Node.js.

        Raises:
            MissingError: it is not installed.
        """
        return self._program_of("node", NODE)

    def search_path(self) -> str:
        """Where programs are found: the installed Node.js first."""
        return f"{self.node().parent}{os.pathsep}{os.environ['PATH']}"

    def version(self, client: str) -> str:
        """The version of a client that is installed."""
        package = PACKAGES[client]
        if not package.is_of_python:
            return _npm_version(self._modules(client), package)
        asked = f"import importlib.metadata as m; print(m.version('{_plain(package.name)}'))"
        command = [str(self.program(client)), "-c", asked]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def install(self, clients: Iterable[str]) -> dict[str, str]:
        """Installs clients, and Node.js for them; returns what failed, by client, in words."""
        wanted = {"node": NODE} | {name: PACKAGES[name] for name in clients}
        told = {name: self._install(name, package) for name, package in wanted.items()}
        return {name: words for name, words in told.items() if words}

    def _modules(self, client: str) -> Path:
        return self._folder / client / "node_modules"

    def _program_of(self, client: str, package: Package) -> Path:
        modules = self._modules(client)
        there = _npm_version(modules, package)
        if there != package.version and not (self._is_newest and there):
            raise MissingError(f"{package.name} {package.version} is not in {self._folder}: {HOW}")
        found = sorted(modules.glob(package.program))
        if not found:
            raise MissingError(f"{package.name} has no program for this machine in {self._folder}")
        return found[0]

    def _install(self, client: str, package: Package) -> str:
        """Installs one package; returns "" or why it could not be installed."""
        at = self._folder / client
        if package.is_of_python:
            commands = [
                [sys.executable, "-m", "venv", str(at)],
                [str(at / "bin/python"), "-m", "pip", "install", "-qU", package.name],
            ]
        else:
            is_newest = self._is_newest and package is not NODE
            release = "latest" if is_newest else package.version
            if not is_newest and _npm_version(self._modules(client), package) == release:
                return ""
            at.mkdir(parents=True, exist_ok=True)
            options = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
            npm = ["npm", "install", *options, "--prefix", str(at)]
            commands = [[*npm, f"{package.name}@{release}"]]
        for command in commands:
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            if done.returncode:
                return done.stderr.strip()[-500:]
        return ""


def pinned() -> Installed:
    """The clients that `make clients` runs."""
    return Installed(folder())


def newest() -> Installed:
    """The newest releases of all clients, beside the pinned ones."""
    return Installed(folder() / "newest", is_newest=True)


def _npm_version(modules: Path, package: Package) -> str:
    """The version of a package of npm, "" if it is not there."""
    about = modules / package.name / "package.json"
    return str(json.loads(about.read_text())["version"]) if about.exists() else ""


def _plain(name: str) -> str:
    """A package's name without its extras."""
    return name.partition("[")[0]


def main() -> int:
    """Installs the pinned clients and prints where each one is; 1 if any is missing afterwards."""
    if shutil.which("npm") is None:
        sys.stderr.write("npm is not on PATH\n")
        return 1
    installed = pinned()
    failed = installed.install(PINNED)
    for name, words in failed.items():
        sys.stderr.write(f"{name}: {words}\n")
    for name in PINNED:
        try:
            sys.stdout.write(f"{name}: {installed.program(name)}\n")
        except MissingError as error:
            sys.stderr.write(f"{error}\n")
            return 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
