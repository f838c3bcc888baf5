"""The commands that the documentation shows, as a reader would copy them."""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    ROOT / "benchmarks" / "results.md",
]

_BLOCK = re.compile(r"^ *```([a-z]*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:curl|kvsteer [a-z]+(?!:))(?: [^`]*)?)`")
_SHELLS = ("", "sh", "console")
_VARIABLES = r"(?:[A-Z_]+=\S+ +)*"
_PROGRAMS = (
    "apt-get curl docker envoy export helm istioctl kubectl make openssl pip pytest python python3"
    " qwen sudo vllm"
)
_WORDS = rf"(?:{'|'.join(_PROGRAMS.split())}|kvsteer [a-z]+(?!:))"
_COMMAND = re.compile(rf"(?:\$ )?({_VARIABLES}{_WORDS}(?: .*)?)", re.DOTALL)


def commands_of(page: Path) -> list[str]:
    """The shell commands in the blocks of a page, and curl's and kvsteer's in its sentences."""
    text = page.read_text()
    blocks = [block for kind, block in _BLOCK.findall(text) if kind in _SHELLS]
    found = [command for block in blocks for command in _commands_in(block)]
    return found + [" ".join(one.split()) for one in _INLINE.findall(_BLOCK.sub("", text))]


def _commands_in(block: str) -> Iterator[str]:
    lines = iter(block.replace("\\\n", " ").splitlines())
    for line in lines:
        if found := _COMMAND.fullmatch(line.strip()):
            yield _whole(found[1], lines)


def _whole(command: str, lines: Iterator[str]) -> str:
    """A command with the lines that follow until its quotes are closed."""
    while True:
        try:
            shlex.split(command, comments=True)
        except ValueError:
            command += f"\n{next(lines)}"
        else:
            return command


def options_by_command(parser: argparse.ArgumentParser) -> dict[str, list[argparse.Action]]:
    """The options of each command of the command line, without those that help does not show."""
    return {
        name: [one for one in command._actions if one.help != argparse.SUPPRESS]
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, command in action.choices.items()
    }
