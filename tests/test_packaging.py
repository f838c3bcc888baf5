"""What an installation gets, with a C compiler and without."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvstate.index import IS_COMPILED

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "extproc" / "admin" / "page"
SOURCES = (
    *("kvstate", "extproc", "simulator"),
    *("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "NOTICE"),
)


def wheel(directory: Path, **environment: str) -> tuple[str, list[str], str]:
    """The tag of a wheel built from a copy of the sources, the names in it, and what was said."""
    copy = directory / "copy"
    copy.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("*.so", "__pycache__")
            shutil.copytree(source, copy / name, ignore=ignored)
        else:
            shutil.copy(source, copy / name)
    command = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation"]
    build = subprocess.run(
        [*command, "--wheel-dir", str(directory), str(copy)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stderr[-2000:]
    (built,) = directory.glob("kvsteer-*.whl")
    tag = built.stem.split("-", 2)[2]
    files = zipfile.ZipFile(built)
    (inside,) = [name for name in files.namelist() if name.endswith(".dist-info/WHEEL")]
    assert f"Tag: {tag}\n" in files.read(inside).decode()
    return tag, files.namelist(), build.stdout + build.stderr


@pytest.mark.slow
@pytest.mark.skipif(not IS_COMPILED, reason="there is no C compiler here")
def test_a_wheel_holds_the_compiled_core_and_the_tiny_model(tmp_path: Path) -> None:
    tag, names, _ = wheel(tmp_path)
    assert tag.startswith("cp311-abi3-")
    assert any(name.startswith("kvstate/_core.") and name.endswith(".so") for name in names)
    assert "simulator/tiny_model/tokenizer.json" in names
    assert {f"extproc/admin/page/{page.name}" for page in PAGE.iterdir()} <= set(names)
    assert "kvstate/py.typed" in names
    assert not [name for name in names if name.endswith((".c", ".h"))]


@pytest.mark.slow
def test_without_a_compiler_the_build_says_so_and_goes_on(tmp_path: Path) -> None:
    tag, names, said = wheel(tmp_path, CC="/nowhere/cc")
    assert tag == "py3-none-any"
    assert "kvstate/plain_core.py" in names
    assert not [name for name in names if name.endswith(".so")]
    assert "kvsteer: the compiled core was not built" in said
