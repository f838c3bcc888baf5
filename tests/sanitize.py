"""Tests the compiled cores under AddressSanitizer and UndefinedBehaviorSanitizer.

    python tests/sanitize.py [TEST ...]

Builds them in a copy of the tree, so that the installed ones stay as they are. Anything that the
sanitizers find ends the run.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = (
    "benchmarks",
    "kvstate",
    "extproc",
    "kvtools",
    "tests",
    "setup.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "NOTICE",
)
FLAGS = "-O1 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all"
TESTED = (
    "kvstate/index/test_compiled_core.py",
    "kvstate/test_copies.py",
    "kvstate/wire/test_groups.py",
    "kvstate/index/test_index.py",
    "kvstate/index/test_index_by_oracle.py",
    "kvstate/test_hybrid_by_oracle.py",
    "kvstate/index/test_index_messages.py",
    "kvstate/test_other_groups.py",
    "kvstate/index/test_core.py",
    "kvstate/test_watch.py",
    "kvstate/test_members.py",
    "kvstate/test_scan.py",
    "extproc/http2/test_answer_fields.py",
    "extproc/http2/test_rules.py",
    "extproc/http2/test_session.py",
    "extproc/http2/test_sessions.py",
    "extproc/requests/test_plain_chat.py",
    "extproc/routing/claims/test_claim_walks.py",
    "extproc/routing/load/test_load_columns.py",
    "extproc/routing/load/test_load_numbers.py",
    "extproc/serving/test_proxy_message.py",
    "extproc/sharing/test_forgeries.py",
    "extproc/tokenizing/test_plain_turns.py",
    "system/attacks/test_fuzz_frames.py::test_calls_of_several_kinds_in_one_read_are_told_as_they_were_sent",
    "system/attacks/test_fuzz_frames.py::test_session_answers_frames_alike_whole_and_in_pieces",
    "system/attacks/test_fuzz_frames.py::test_session_survives_any_bytes",
)


def copy_tree(into: Path) -> None:
    """Copies what the build and the tests need, without anything that was built."""
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, into / name, ignore=ignored)
        else:
            shutil.copy(source, into / name)


def sanitizer_runtime() -> str:
    """The library that has to be loaded before Python, since Python was built without it."""
    command = ["gcc", "-print-file-name=libasan.so"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def chosen(arguments: Sequence[str] | None = None) -> Sequence[str]:
    """Returns the tests to run, as files or file::test below tests/.

    arguments: of the command line; None for this process's.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "tests",
        nargs="*",
        metavar="TEST",
        help=f"a file below tests/, such as {TESTED[0]}, or file::test; by default all that tests"
        " the cores",
    )
    named: list[str] = parser.parse_args(arguments).tests
    for name in named:
        if not (ROOT / "tests" / name.partition("::")[0]).exists():
            parser.error(f"there is no tests/{name}: name a file below tests/")
    return named or TESTED


def main() -> int:
    """Builds and tests; the exit status is pytest's."""
    names = chosen()
    with tempfile.TemporaryDirectory(prefix="kvsteer-sanitize-") as directory:
        tree = Path(directory)
        copy_tree(tree)
        build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        environment = {**os.environ, "KVSTEER_CFLAGS": FLAGS, "LDSHARED": f"gcc -shared {FLAGS}"}
        subprocess.run(build, cwd=tree, env=environment, check=True)
        tests = [str(tree / "tests" / name) for name in names]
        environment = {
            **os.environ,
            "LD_PRELOAD": sanitizer_runtime(),
            # the interpreter keeps what it allocates until it ends
            "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
            "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
            "PYTHONMALLOC": "malloc",
            "PYTHONPATH": str(tree),
        }
        for core in ("kvstate._core", "extproc._core"):
            check = f"import {core} as core; assert core.__file__.startswith({str(tree)!r})"
            subprocess.run([sys.executable, "-c", check], cwd=tree, env=environment, check=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
        return subprocess.run(command, cwd=tree, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
