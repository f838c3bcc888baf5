"""Every pure module is covered, branches too, by the tests of pure modules and of some shells.

They run here as they do elsewhere, quick and slow ones, with many examples: CI need not run them
again (`tests.pure_tests`).
"""

import ast
import json
import os
import subprocess
import sys
from typing import Any

import coverage
import pytest

from tests.imports import MODULES, ROOT, is_measured, pure_modules, tree_of
from tests.pure_tests import files_of_pure_tests


def _has_code(module: str) -> bool:
    return any(isinstance(node, ast.FunctionDef) for node in ast.walk(tree_of(module)))


def _pure() -> list[str]:
    """The pure modules in which there is something to run."""
    measured = (name for name in pure_modules() if is_measured(name))
    return sorted(name for name in measured if _has_code(name))


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one run of these test files reaches, by file."""
    data = tmp_path_factory.mktemp("coverage") / "data"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += map(str, files_of_pure_tests())
    command += ["--cov", "--cov-branch", "--cov-report="]
    command += ["--override-ini=addopts=--import-mode=importlib"]
    command += ["-n", "2", "--dist", "worksteal"]
    command += ["--timeout=900"]  # coverage makes the longest five times as long
    environment = {**os.environ, "COVERAGE_FILE": str(data), "KVSTEER_EXAMPLES": "thorough"}
    environment.pop("KVSTEER_BESIDES", None)
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:]
    found = coverage.Coverage(data_file=str(data), branch=True)
    found.load()
    report = data.with_name("report.json")
    found.json_report(outfile=str(report), morfs=[str(MODULES[one]) for one in _pure()])
    found.get_data().close()
    files: dict[str, Any] = json.loads(report.read_text())["files"]
    return {str((ROOT / name).resolve()): one for name, one in files.items()}


def _uncovered(module: str, measured: dict[str, Any]) -> str:
    """What the tests do not reach of a module, "" if they reach all."""
    found = measured[str(MODULES[module].resolve())]
    lines, branches = found["missing_lines"], found["missing_branches"]
    return f"{module}: lines {lines}, branches {branches}" if lines or branches else ""


@pytest.mark.slow
@pytest.mark.timeout(3600)  # a busy machine takes several times as long
def test_pure_modules_are_all_covered(
    measured: dict[str, Any],
) -> None:
    modules = _pure()
    assert len(modules) > 50
    uncovered = [shown for module in modules if (shown := _uncovered(module, measured))]
    assert not uncovered, "\n".join(uncovered)
