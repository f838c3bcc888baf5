"""What `make` would do on other machines."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.missing_headers import without_headers

ROOT = Path(__file__).resolve().parent.parent
SOURCES = (
    "Makefile",
    "pyproject.toml",
    "kvtools/pyproject.toml",
    "setup.py",
    "requirements-demo.lock",
)


def steps(folder: Path, programs: tuple[str, ...]) -> str:
    """Returns what `make demo` would do in a new clone where only these programs are installed."""
    clone, path = folder / "clone", folder / "bin"
    clone.mkdir()
    path.mkdir()
    (clone / "kvtools").mkdir()
    for name in (*SOURCES, "requirements-compiler.lock"):
        shutil.copy(ROOT / name, clone / name)
    for name in ("sh", "make", *programs):
        (path / name).symlink_to(shutil.which(name) or "/bin/true")
    command = [str(path / "make"), "--dry-run", "demo"]
    environment = {"PATH": str(path)}
    run = subprocess.run(
        command, cwd=clone, env=environment, capture_output=True, text=True, check=True
    )
    return run.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_machine_without_a_compiler_installs_one_and_builds_with_it(tmp_path: Path) -> None:
    shown = steps(tmp_path, ())
    assert "-r requirements-compiler.lock" in shown
    assert "-m ziglang cc'" in shown
    assert "-m ziglang cc -shared'" in shown


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("compiler", ["cc", "gcc", "clang"])
def test_machine_with_a_compiler_builds_with_its_own(tmp_path: Path, compiler: str) -> None:
    shown = steps(tmp_path, (compiler,))
    assert "--editable ." in shown
    assert "ziglang" not in shown
    assert "requirements-compiler.lock" not in shown


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_machine_without_the_headers_of_python_is_told_before_anything_is_installed(
    tmp_path: Path,
) -> None:
    command = ["make", "demo", f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}"]
    environment = {**os.environ, "PYTHONPATH": without_headers(tmp_path)}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 2
    assert "the headers of Python are missing" in run.stderr
    assert "apt-get install python3-dev" in run.stderr
    assert "`docker compose up`" in run.stderr
    assert not (tmp_path / "venv").exists()
