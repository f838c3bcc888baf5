"""Every pure module is covered, branches too, by the tests of its package."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

from kvstate.core_choice import IS_COMPILED
from tests.purity import PURE

# Modules of declarations only: there is nothing in them to run.
INTERFACES = {"kvstate.core", "extproc.discovery.sources", "extproc.observing.traces"}

# How many lines are not covered yet, to be brought down to none; branches of these modules are not
# looked at.
GAPS = {
    "extproc.picking.decision_terms": 1,
    "extproc.requests.request_parts": 1,
    "kvstate.event_applier": 1,
    "kvstate.feeds.sink": 2,
    "kvstate.plain_core": 1,
    "kvstate.wire.zmtp": 1,
}

ROOT = Path(__file__).resolve().parent.parent
TESTS = {
    module: f"tests/{'/'.join(module.split('.')[:-1])}/test_{module.split('.')[-1]}.py"
    for module in PURE
}


def source_of(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[coverage.Coverage]:
    """One run of the own test files of all pure modules, each test a context of its own."""
    data = tmp_path_factory.mktemp("coverage") / "data"
    files = [file for file in TESTS.values() if (ROOT / file).exists()]
    files += ["tests/kvstate/test_steps.py", "tests/kvstate/test_index_messages.py"]
    files += ["tests/extproc/test_router.py", "tests/kvstate/test_fleet.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    command += ["--cov", "--cov-branch", "--cov-context=test", "--cov-report="]
    command += ["--override-ini=addopts=--import-mode=importlib"]
    environment = {**os.environ, "COVERAGE_FILE": str(data)}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout[-3000:]
    found = coverage.Coverage(data_file=str(data), branch=True)
    found.load()
    yield found
    found.get_data().close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    not IS_COMPILED, reason="covered only where both cores are built: no C compiler"
)
@pytest.mark.parametrize("module", PURE)
def test_a_pure_module_is_covered_by_the_tests_of_its_package(
    module: str, measured: coverage.Coverage
) -> None:
    source, tests = source_of(module), f"tests/{module.partition('.')[0]}"
    if not (ROOT / TESTS[module]).exists():
        code = re.findall(r"^( *)def ", source.read_text(), re.MULTILINE)
        assert module in INTERFACES or not code, f"{module} has code and no test file"
        return
    # what runs on import belongs to no test
    measured.get_data().set_query_contexts([f"^{re.escape(tests)}/", "^$"])
    found = measured._analyze(str(source))
    missing = sorted(found.missing)
    assert len(missing) <= GAPS.get(module, 0), f"lines not covered by {tests}: {missing}"
    if module in GAPS:
        return
    branches = {line: sorted(ends) for line, ends in found.missing_branch_arcs().items()}
    assert not branches, f"branches not covered by {tests}: {branches}"
