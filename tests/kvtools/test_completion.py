import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from kvtools.completion import commands_of, script

BASH = shutil.which("bash") or "/bin/bash"
ZSH, FISH = shutil.which("zsh"), shutil.which("fish")


def small() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvsteer")
    parser.add_argument("--version", action="store_true")
    commands = parser.add_subparsers()
    play = commands.add_parser("play", description="Plays it: 'again'.")
    play.add_argument("--config", metavar="FILE", help="the [whole] configuration")
    play.add_argument("--policy", choices=("cost", "random"), help="a policy")
    play.add_argument("--rate", metavar="X", help="100 %% is all")
    play.add_argument("-q", action="store_true", help="says nothing")
    play.add_argument("--hidden", help=argparse.SUPPRESS)
    play.add_argument("trace", metavar="TRACE")
    commands.add_parser("shell").add_argument("name", choices=("one", "two"))
    return parser


def completed(line: str, directory: Path, source: str) -> list[str]:
    """Returns what bash offers for the last word of a line."""
    words = line.split(" ")
    ask = (
        f"{source}\nCOMP_WORDS=({' '.join(repr(word) for word in words)})\n"
        f"COMP_CWORD={len(words) - 1}\n"
        f'_kvsteer kvsteer "{words[-1]}" "{words[-2]}"\nprintf "%s\\n" "${{COMPREPLY[@]}}"\n'
    )
    done = subprocess.run(
        [BASH, "-u"], input=ask, cwd=directory, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("kvsteer p", ["play"]),
        ("kvsteer --v", ["--version"]),
        ("kvsteer play --c", ["--config"]),
        ("kvsteer play --h", ["--help"]),
        ("kvsteer play --config k", ["kvsteer.yaml"]),
        ("kvsteer play --policy ", ["cost", "random"]),
        ("kvsteer play --rate k", []),
        ("kvsteer play k", ["kvsteer.yaml"]),
        ("kvsteer shell t", ["two"]),
        ("kvsteer shell --h", ["--help"]),
        ("kvsteer unknown --h", []),
    ],
)
def test_bash_offers_commands_options_and_files(
    tmp_path: Path, line: str, offered: list[str]
) -> None:
    (tmp_path / "kvsteer.yaml").touch()
    assert completed(line, tmp_path, script("bash", commands_of(small()))) == offered


def test_fish_script_describes_the_values_of_an_option() -> None:
    lines = script("fish", commands_of(small())).splitlines()
    of_shell = "complete -c kvsteer -n '__fish_seen_subcommand_from shell'"
    of_play = "complete -c kvsteer -n '__fish_seen_subcommand_from play'"
    assert (
        r"complete -c kvsteer -n __fish_use_subcommand -a play -d 'Plays it: \'again\'.'" in lines
    )
    assert f"{of_play} -l config -r -F -d 'the [whole] configuration'" in lines
    assert f"{of_play} -l policy -x -a 'cost random' -d 'a policy'" in lines
    assert f"{of_play} -s q -d 'says nothing'" in lines
    assert f"{of_shell} -a 'one two' -d ''" in lines
    assert f"{of_play} -l rate -x -d '100 % is all'" in lines


def test_zsh_script_describes_the_values_of_an_option() -> None:
    text = script("zsh", commands_of(small()))
    assert text.startswith("#compdef kvsteer\n")
    for part in (
        r"'--config[the \[whole\] configuration]:file:_files'",
        "'--policy[a policy]:value:(cost random)'",
        "'--rate[100 % is all]:value: '",
        "'-q[says nothing]'",
        "'*:file:_files'",
        "'*:value:(one two)'",
    ):
        assert part in text


@pytest.mark.skipif(FISH is None, reason="needs fish (on Debian: the package fish)")
def test_fish_completes_with_the_script() -> None:
    asked = f"{script('fish', commands_of(small()))}\ncomplete -C 'kvsteer play --po'"
    done = subprocess.run([str(FISH)], input=asked, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("--policy\t")


@pytest.mark.skipif(ZSH is None, reason="needs zsh (on Debian: the package zsh)")
def test_zsh_accepts_the_script() -> None:
    source = script("zsh", commands_of(small()))
    asked = f"autoload -U compinit; compinit -D\n{source}\nprint ${{_comps[kvsteer]}}"
    done = subprocess.run([str(ZSH), "-f"], input=asked, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("_kvsteer\n", "")
