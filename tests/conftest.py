"""Settings and hooks for all tests."""

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from tests.built_core import stale_cores
from tests.pure_tests import left_out
from tests.tables import Printer

# No deadline: how long one example takes on a busy machine means nothing. The explain phase traces
# every line, which takes minutes for a counterexample that is printed anyway.
PHASES = [phase for phase in Phase if phase is not Phase.explain]

# The examples of a run are always the same, so that a failing run points to the change; CI uses
# more of them, and `make explore` searches for others.
settings.register_profile("steady", deadline=None, phases=PHASES, derandomize=True, max_examples=20)
settings.register_profile(
    "thorough", deadline=None, phases=PHASES, derandomize=True, max_examples=100
)
settings.register_profile(
    "explore", deadline=None, phases=PHASES, print_blob=True, max_examples=400
)
settings.load_profile(os.environ.get("KVSTEER_EXAMPLES", "steady"))


_LEFT_OUT = left_out()

_TESTS_A_COLLECTION = 200
_NO_FULL_COLLECTION = 1_000_000  # of collections of the middle generation


class Collector:
    """Collects all garbage between tests instead of within one.

    With what a long run keeps, a full collection takes longer than a template may take in a test.
    """

    def __init__(self) -> None:
        self._tests = 0

    def pytest_runtest_logfinish(self) -> None:
        """Counts a test that is over, and collects after many."""
        self._tests += 1
        if self._tests % _TESTS_A_COLLECTION == 0:
            gc.collect()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leaves out what CI has run under coverage."""
    return True if collection_path in _LEFT_OUT else None


def pytest_configure(config: pytest.Config) -> None:
    """Rejects a core that is older than its sources, which would fail in puzzling ways."""
    if complaint := stale_cores():
        raise pytest.UsageError(complaint)
    config.pluginmanager.register(Printer())
    config.pluginmanager.register(Collector())
    gc.disable()


def pytest_collection_finish() -> None:
    """Has each encoder chosen only once, and keeps the garbage collector from walking tests."""
    if "extproc.tokenizing.tokens" in sys.modules:
        from tests.chosen_encoders import choose_once

        choose_once()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, _NO_FULL_COLLECTION)
    gc.enable()
