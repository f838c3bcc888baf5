import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.built_core import stale_core

TESTS = Path(__file__).resolve().parent


def test_stale_core_names_the_command_that_rebuilds_it(
    tmp_path: Path,
) -> None:
    core, source = tmp_path / "_core.abi3.so", tmp_path / "index.c"
    core.touch()
    source.touch()
    os.utime(core, (1_000, 1_000))
    os.utime(source, (1_001, 1_001))
    assert "older than index.c" in stale_core(core, tmp_path)
    assert "python setup.py build_ext --inplace" in stale_core(core, tmp_path)
    os.utime(core, (1_002, 1_002))
    assert stale_core(core, tmp_path) == ""
    assert "is missing: build it with" in stale_core(None, tmp_path)


def test_stale_core_runs_no_test(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    for name in ("conftest.py", "built_core.py", "tables.py", "imports.py", "pure_tests.py"):
        shutil.copy(TESTS / name, tmp_path / "tests")
    (tmp_path / "tests" / "test_nothing.py").write_text("def test_nothing(): pass")
    (tmp_path / "extproc").mkdir()
    (tmp_path / "extproc" / "__init__.py").touch()
    (tmp_path / "kvstate" / "native").mkdir(parents=True)
    for name in ("__init__.py", "_core.abi3.so", "native/index.c"):
        (tmp_path / "kvstate" / name).touch()
    os.utime(tmp_path / "kvstate" / "_core.abi3.so", (1_000, 1_000))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 4, run.stdout
    assert "build it with `python setup.py build_ext --inplace`" in run.stderr
