"""Every pure module is covered, branches too, by its own test file alone."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvstate.core_choice import IS_COMPILED
from tests.purity import PURE

# Modules of declarations only: there is nothing in them to run.
INTERFACES = {"kvstate.core", "extproc.observing.traces"}

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
@pytest.mark.skipif(
    not IS_COMPILED, reason="covered only where both cores are built: no C compiler"
)
@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_is_covered_by_its_own_tests(module: str, tmp_path: Path) -> None:
    source = ROOT / module.replace(".", "/")
    folder = source.relative_to(ROOT).parent
    tests = ROOT / "tests" / folder / f"test_{source.name}.py"
    if not tests.exists():
        code = re.findall(r"^( *)def ", source.with_suffix(".py").read_text(), re.MULTILINE)
        assert module in INTERFACES or not code, f"{module} has code and no test file"
        return
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    command += [f"--cov={module}", "--cov-branch", "--cov-fail-under=100"]
    command += ["--cov-report=term-missing", "--override-ini=addopts=--import-mode=importlib"]
    environment = {**os.environ, "COVERAGE_FILE": str(tmp_path / "coverage")}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:]
