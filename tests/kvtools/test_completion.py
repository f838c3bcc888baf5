import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from kvtools.completion import script

BASH = shutil.which("bash") or "/bin/bash"
ZSH, FISH = shutil.which("zsh"), shutil.which("fish")


def small() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvsteer")
    parser.add_argument("--version", action="store_true")
    commands = parser.add_subparsers(help=argparse.SUPPRESS)
    play = commands.add_parser("play", help="plays it: 'again'")
    play.add_argument("--config", metavar="FILE", help="the [whole] configuration")
    play.add_argument("--policy", choices=("cost", "random"), help="a policy")
    play.add_argument("--rate", metavar="X", help="100 %% is all")
    play.add_argument("--hidden", help=argparse.SUPPRESS)
    play.add_argument("trace", metavar="TRACE")
    commands.add_parser("shell", help="a shell").add_argument("name", choices=("one", "two"))
    return parser


def completed(line: str, directory: Path, source: str) -> list[str]:
    """Returns what bash offers for the last word of a line."""
    words = line.split(" ")
    ask = (
        f"{source}\nCOMP_WORDS=({' '.join(repr(word) for word in words)})\n"
        f"COMP_CWORD={len(words) - 1}\n"
        f'_shtab_kvsteer kvsteer "{words[-1]}" "{words[-2]}"\nprintf "%s\\n" "${{COMPREPLY[@]}}"\n'
    )
    done = subprocess.run(
        [BASH], input=ask, cwd=directory, capture_output=True, text=True, check=True
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
        ("kvsteer unknown k", []),
    ],
)
def test_bash_offers_commands_options_and_files(
    tmp_path: Path, line: str, offered: list[str]
) -> None:
    (tmp_path / "kvsteer.yaml").touch()
    assert completed(line, tmp_path, script("bash", small())) == offered


@pytest.mark.skipif(FISH is None, reason="needs fish (on Debian: the package fish)")
@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("kvsteer pl", "play\tplays it: 'again'"),
        ("kvsteer play --po", "--policy\ta policy"),
        ("kvsteer play --policy ra", "random\ta policy"),
        ("kvsteer shell t", "two"),
    ],
)
def test_fish_completes_with_the_script(line: str, offered: str) -> None:
    asked = f"{script('fish', small())}\ncomplete -C '{line}'"
    done = subprocess.run([str(FISH)], input=asked, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[0].startswith(offered)
    assert "hidden" not in asked


@pytest.mark.skipif(ZSH is None, reason="needs zsh (on Debian: the package zsh)")
def test_zsh_accepts_the_script(tmp_path: Path) -> None:
    (tmp_path / "_kvsteer").write_text(script("zsh", small()))
    asked = (
        "autoload -U compinit; compinit -D\n"
        f'eval "$(cat {tmp_path}/_kvsteer)"\nprint ${{_comps[kvsteer]}}'
    )
    done = subprocess.run([str(ZSH), "-f"], input=asked, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("_shtab_kvsteer\n", "")
