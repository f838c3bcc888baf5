"""Every `kvsteer` command in the documentation is one that the command line accepts.

tests/system/documents runs those that can be run.
"""

import contextlib
import functools
import io
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from extproc.__main__ import make_parser
from tests.documented import PAGES, options_by_command

# The program's name, in a container's command after that of the image, and a command's.
_COMMAND = re.compile(r"(?:^|[\s/])kvsteer (?=(?!kvsteer )[a-z]+(?:\s|$))")
_AFTER = re.compile(r"\s(#|\||>|<|2>|&&|;).*$")

# Not commands: the name of a span in traces.
_OTHERS = {"decision"}


def commands_in(text: str) -> Iterator[str]:
    """The command lines in the blocks of a page, without the program's name."""
    for block in re.findall(r"^ *```[a-z]*\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if found := _COMMAND.search(line):
                yield _AFTER.sub("", line[found.end() :].strip())


def test_commands_in_blocks_are_accepted() -> None:
    parser, refused, count = make_parser(None), [], 0
    for page in PAGES:
        if page.name == "CHANGELOG.md":  # it shows what was
            continue
        for command in commands_in(page.read_text()):
            said = io.StringIO()
            count += 1
            try:
                with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                    parser.parse_args(shlex.split(command))
            except SystemExit as end:
                if end.code:
                    refused.append(f"{page.name}: kvsteer {command}: {said.getvalue()[-200:]}")
    assert count >= 25
    assert not refused, "\n".join(refused)


@functools.cache
def options() -> dict[str, set[str]]:
    """The options of every command."""
    return {
        name: {option for one in found for option in one.option_strings}
        for name, found in options_by_command(make_parser(None)).items()
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_sentences_exist_with_their_options(page: Path) -> None:
    known = options()
    for shown in re.findall(r"`kvsteer ([a-z][^`]*)`", page.read_text()):
        name, *rest = shown.split()
        if name in _OTHERS or (page.name == "CHANGELOG.md" and name not in known):
            continue
        assert name in known, shown
        named = {one.partition("=")[0] for one in rest if one.startswith("--")}
        assert named <= known[name], shown
