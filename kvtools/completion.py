"""`kvsteer completion`: completes commands, options and their values in bash, zsh and fish.

The scripts are generated from the parser itself, so they match this version, and no shell has to
start Python for each completion.
"""

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

SHELLS = ("bash", "fish", "zsh")

# Placeholders for files and directories in the usage; other values are not completed.
_FILES = frozenset({"FILE", "PATH", "TRACE", "DIRECTORY"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.set_defaults(run=_run)
    parser.add_argument("shell", choices=SHELLS, help="the shell to complete in")


def _run(arguments: argparse.Namespace) -> int:
    from extproc.__main__ import make_parser

    print(script(arguments.shell, commands_of(make_parser(None))), end="")
    return 0


class Option(NamedTuple):
    """One option of a command, or one value that stands alone (names is empty).

    help: one line. choices: the values that it accepts; empty if it accepts others too.
    """

    names: Sequence[str]
    help: str
    takes_value: bool
    is_file: bool
    choices: Sequence[str]


Commands = Mapping[str, tuple[str, Sequence[Option]]]


def commands_of(parser: argparse.ArgumentParser) -> Commands:
    """Returns the commands of a parser by name, each with its help and its options."""
    return {
        name: (_line(one.description), [_option(action) for action in _visible_actions(one)])
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, one in action.choices.items()
    }


def _visible_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if action.help != argparse.SUPPRESS:
            yield action


def _option(action: argparse.Action) -> Option:
    help_text = (action.help or "").replace("%%", "%")
    metavar = action.metavar or ""
    return Option(
        names=tuple(action.option_strings),
        help=_line(help_text),
        takes_value=action.nargs != 0,
        is_file=isinstance(metavar, str) and metavar in _FILES,
        choices=tuple(map(str, action.choices or ())),
    )


def _line(text: str | None) -> str:
    return " ".join((text or "").split())


def script(shell: str, commands: Commands) -> str:
    """Returns the completion script of `kvsteer`; shell: one of SHELLS."""
    return {"bash": _bash, "fish": _fish, "zsh": _zsh}[shell](commands)


def _bash(commands: Commands) -> str:
    cases = "\n".join(_bash_case(name, options) for name, (_, options) in commands.items())
    first = shlex.quote(" ".join([*commands, "--help", "--version"]))
    return f"""\
# bash completion of kvsteer:  source <(kvsteer completion bash)
_kvsteer() {{
    local word=$2 before=$3 options= files= values= alone= reads=
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W {first} -- "$word"))
        return
    fi
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
    case " $files " in *" $before "*) COMPREPLY=($(compgen -f -- "$word")); return ;; esac
    case " $values " in *" $before "*) return ;; esac
    case $word in
    -*) COMPREPLY=($(compgen -W "$options" -- "$word")) ;;
    *) [ -z "$alone" ] || COMPREPLY=($(compgen -W "$alone" -- "$word"))
       [ -z "$reads" ] || COMPREPLY=($(compgen -f -- "$word")) ;;
    esac
}}
complete -o filenames -F _kvsteer kvsteer
"""


def _bash_case(name: str, options: Sequence[Option]) -> str:
    named = [one for one in options if one.names]
    alone = [one for one in options if not one.names]
    words = {
        "options": [name for one in named for name in one.names],
        "files": [name for one in named if one.is_file for name in one.names],
        "values": [name for one in named if one.takes_value for name in one.names],
        "alone": [value for one in alone for value in one.choices],
        "reads": ["yes"] if any(one.is_file for one in alone) else [],
    }
    sets = " ".join(f"{key}={shlex.quote(' '.join(value))}" for key, value in words.items())
    choices = "".join(
        f"\n        case $before in {'|'.join(one.names)})"
        f' COMPREPLY=($(compgen -W {shlex.quote(" ".join(one.choices))} -- "$word"));'
        " return ;; esac"
        for one in named
        if one.choices
    )
    return f"    {name}) {sets}{choices} ;;"


def _zsh(commands: Commands) -> str:
    described = "\n".join(
        f"        {shlex.quote(f'{name}:{_colons(help_text)}')}"
        for name, (help_text, _) in commands.items()
    )
    cases = "\n".join(
        f"    {name}) _arguments {' '.join(spec for one in options for spec in _zsh_specs(one))} ;;"
        for name, (_, options) in commands.items()
    )
    return f"""\
#compdef kvsteer
# zsh completion of kvsteer:  source <(kvsteer completion zsh), or a file _kvsteer in $fpath
_kvsteer() {{
    local -a commands
    commands=(
{described}
    )
    if (( CURRENT == 2 )); then
        _describe 'command' commands
        _arguments '--help[show help]' '--version[show version and core]'
        return
    fi
    local command=$words[2]
    shift words
    (( CURRENT-- ))
    case $command in
{cases}
    esac
}}
if [ "$funcstack[1]" = _kvsteer ]; then _kvsteer "$@"; else compdef _kvsteer kvsteer; fi
"""


def _zsh_specs(one: Option) -> Iterator[str]:
    if one.choices:
        value = f":value:({' '.join(one.choices)})"
    else:
        value = ":file:_files" if one.is_file else ":value: " if one.takes_value else ""
    if not one.names:
        yield shlex.quote(f"*{value}")
    help_text = _colons(one.help).replace("[", r"\[").replace("]", r"\]")
    for name in one.names:
        yield shlex.quote(f"{name}[{help_text}]{value}")


def _colons(text: str) -> str:
    return text.replace(":", r"\:")


def _fish(commands: Commands) -> str:
    lines = [
        "# fish completion of kvsteer:  kvsteer completion fish | source",
        "complete -c kvsteer -f",
        "complete -c kvsteer -n __fish_use_subcommand -l help -d 'show help'",
        "complete -c kvsteer -n __fish_use_subcommand -l version -d 'show version and core'",
    ]
    for name, (help_text, options) in commands.items():
        lines.append(
            f"complete -c kvsteer -n __fish_use_subcommand -a {name} -d {_fished(help_text)}"
        )
        of_it = f"complete -c kvsteer -n '__fish_seen_subcommand_from {name}'"
        lines += [f"{of_it}{_part(one)}" for one in options]
    return "".join(f"{line}\n" for line in lines)


def _part(one: Option) -> str:
    said = ""
    for name in one.names:
        said += f" -l {name[2:]}" if name.startswith("--") else f" -s {name[1:]}"
    if one.is_file:
        said += " -r -F"
    elif one.takes_value:
        said += " -x" if one.names else ""
    if one.choices:
        said += f" -a {_fished(' '.join(one.choices))}"
    return f"{said} -d {_fished(one.help)}"


def _fished(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
