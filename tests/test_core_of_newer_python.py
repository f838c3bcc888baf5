"""The compiled core built with a newer Python's headers, and loaded by this one."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sanitize import copy_tree

pytestmark = pytest.mark.slow  # it compiles the core

NATIVE = Path(__file__).resolve().parent.parent / "kvstate" / "native"
# In 3.12 and later, constants are immortal, and the headers take no references to them.
NEWER = [f"3.{minor}" for minor in range(sys.version_info.minor + 1, 16) if minor >= 12]
TESTED = ["test_compiled_core.py", "test_index.py", "test_index_messages.py"]
# More calls than this Python has references to None, True and False.
WORN = """
from kvstate.index.core import Core
from kvstate.overlap import Overlap
core = Core(1, 10, Overlap)
owner = core.add_owner(0, core.add_model(b"m"), 0)
for _ in range(100_000):
    core.abandon(owner)
    core.trust(owner, True)
    core.check()
    assert core.start(owner, b"", 1) is False
    assert core.apply(owner, b"") is None
    assert core.clear_some(owner, 1) is True
    assert core.layout(owner) == (None, None)
"""


def headers() -> Path | None:
    """The headers of a newer Python on this machine; None if there are none."""
    program = "import sysconfig; print(sysconfig.get_path('include'))"
    for version in NEWER:
        python = shutil.which(f"python{version}")
        if python is None:
            continue
        environment = {**os.environ, "PYENV_VERSION": version}  # of pyenv, if that is in the way
        command = [python, "-c", program]
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        found = Path(said.stdout.strip())
        if said.returncode == 0 and (found / "Python.h").exists():
            return found
    return None


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree, with such a core."""
    include, compiler = headers(), shutil.which("gcc")
    if include is None or compiler is None:
        missing = "gcc" if compiler is None else f"headers of a Python newer than {sys.version[:4]}"
        pytest.skip(f"needs {missing}")
    made = tmp_path_factory.mktemp("tree")
    copy_tree(made)
    sources = sorted(map(str, NATIVE.glob("*.c")))
    # also the way in which overlaps are made where tuples keep their hash
    flags = ["-shared", "-fPIC", "-O1", "-DHASHED_TUPLES=0", f"-I{include}"]
    core = made / "kvstate" / "_core.abi3.so"
    subprocess.run([compiler, *flags, *sources, "-o", str(core)], check=True)
    return made


def test_core_of_newer_headers_passes_its_tests(tree: Path) -> None:
    tests = [str(tree / "tests" / "kvstate" / "index" / name) for name in TESTED]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_core_of_newer_headers_takes_references_to_constants(tree: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", WORN], cwd=tree, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
