"""Every pure module is covered, branches too, by the tests of its package."""

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

from kvstate.index import IS_COMPILED
from tests.house import MEASURED, MODULES, ROOT, imports_in, pure_modules, tree_of


def _has_code(module: str) -> bool:
    return any(isinstance(node, ast.FunctionDef) for node in ast.walk(tree_of(module)))


def _pure() -> list[str]:
    """The pure modules in which there is something to run."""
    measured = (name for name in pure_modules() if name.startswith(MEASURED))
    return sorted(name for name in measured if _has_code(name))


# Quick tests of shells that run pure modules as well.
BESIDES = (
    *("tests/extproc/checking/test_watch.py", "tests/extproc/test_router.py"),
    *("tests/extproc/serving/test_exchange.py", "tests/kvstate/test_fleet.py"),
    *("tests/extproc/doctor/test_probe.py", "tests/extproc/observing/test_drift_families.py"),
    *("tests/extproc/observing/test_metrics.py", "tests/extproc/admin/test_application.py"),
    *("tests/extproc/test_fleet_scenarios.py", "tests/extproc/test_envoy_patch.py"),
)

# Impure modules that tests may import as well, to set something up.
READERS = {"extproc.config.reader", "extproc.tokenizer_files"}


def _test_files() -> Iterator[Path]:
    """The tests that import only pure modules of the product, and those named above."""
    yield from (ROOT / name for name in BESIDES)
    for package in MEASURED:
        for file in sorted((ROOT / "tests" / package).rglob("test_*.py")):
            ours = {name for name in imports_in(file) if name in MODULES}
            if ours and ours <= pure_modules() | READERS:
                yield file


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[coverage.Coverage]:
    """The coverage of one run of these test files, with a context for each test."""
    data = tmp_path_factory.mktemp("coverage") / "data"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += map(str, _test_files())
    command += ["--cov", "--cov-branch", "--cov-context=test", "--cov-report="]
    command += ["--override-ini=addopts=--import-mode=importlib"]
    command += ["-n", "2", "--dist", "worksteal"]
    environment = {**os.environ, "COVERAGE_FILE": str(data), "KVSTEER_EXAMPLES": "thorough"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:]
    found = coverage.Coverage(data_file=str(data), branch=True)
    found.load()
    yield found
    found.get_data().close()


def _uncovered(module: str, measured: coverage.Coverage) -> str:
    """What the tests of a module's package do not reach of it, "" if they reach all."""
    source, tests = MODULES[module], f"tests/{module.partition('.')[0]}"
    # what runs on import belongs to no test
    measured.get_data().set_query_contexts([f"^{re.escape(tests)}/", "^$"])
    found = measured._analyze(str(source))
    branches = {line: sorted(ends) for line, ends in found.missing_branch_arcs().items()}
    if not found.missing and not branches:
        return ""
    return f"{module}: lines {sorted(found.missing)}, branches {branches}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    not IS_COMPILED, reason="covered only where both cores are built: no C compiler"
)
def test_every_pure_module_is_covered_by_the_tests_of_its_package(
    measured: coverage.Coverage,
) -> None:
    modules = _pure()
    assert len(modules) > 50
    uncovered = [told for module in modules if (told := _uncovered(module, measured))]
    assert not uncovered, "\n".join(uncovered)
