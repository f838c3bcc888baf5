"""What holds for all tests."""

import gc
import os

import pytest
from hypothesis import Phase, settings

from tests.built_core import installed_core, stale_core
from tests.tables import Printer

# A property is true or not; how long one example takes on a busy machine says nothing.
# The explain phase traces every line: minutes, for a counterexample that is printed anyway.
PHASES = [phase for phase in Phase if phase is not Phase.explain]

# A run that turns red says that the change did it, so the examples of a run are always the same;
# `make explore` looks for others.
settings.register_profile("steady", deadline=None, phases=PHASES, derandomize=True)
settings.register_profile(
    "explore", deadline=None, phases=PHASES, print_blob=True, max_examples=400
)
settings.load_profile(os.environ.get("KVSTEER_EXAMPLES", "steady"))

# Tests are about the sources, and some trace them; tests/test_compiled_path.py compiles them.
os.environ.setdefault("KVSTEER_REQUEST_PATH", "plain")


def pytest_configure(config: pytest.Config) -> None:
    """Refuses a core that its sources no longer describe: its tests would fail in puzzling ways."""
    if complaint := stale_core(installed_core()):
        raise pytest.UsageError(complaint)
    config.pluginmanager.register(Printer())
    gc.disable()


def pytest_collection_finish() -> None:
    """Keeps the collector from walking thousands of tests again and again."""
    gc.freeze()
    gc.enable()
