"""`kvsteer completion`: completes commands, options and their values in bash, zsh and fish.

The scripts are generated from the parser itself, so they match this version, and no shell has to
start Python for each completion.
"""

import argparse

import shtab

SHELLS = ("bash", "fish", "zsh")

# Placeholders for files and directories in the usage; other values are not completed.
_FILES = frozenset({"FILE", "PATH", "TRACE", "DIRECTORY"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.set_defaults(run=_run)
    parser.add_argument("shell", choices=SHELLS, help="the shell to complete in")


def _run(arguments: argparse.Namespace) -> int:
    from extproc.__main__ import make_parser

    print(script(arguments.shell, make_parser(None)))
    return 0


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Returns the script that completes a parser's commands and options; shell: one of SHELLS."""
    _mark_files(parser)
    return shtab.complete(parser, shell)


def _mark_files(parser: argparse.ArgumentParser) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            action.help = None  # commands of a list that help leaves out would not be completed
            for command in action.choices.values():
                _mark_files(command)
        elif action.metavar in _FILES:
            action.complete = shtab.FILE  # type: ignore[attr-defined]
