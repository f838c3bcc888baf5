import importlib
import sys

import pytest

from kvstate import index
from kvstate.index import default_core_name, make_core, plain_core_warning
from kvstate.plain_core import PlainCore
from tests.kvstate.cores import needs_compiled_core


def test_plain_core_is_available_on_request() -> None:
    assert isinstance(make_core(1, 10, compiled=False), PlainCore)


@needs_compiled_core
def test_compiled_core_is_the_default_where_it_was_built() -> None:
    assert not isinstance(make_core(1, 10), PlainCore)
    assert default_core_name() == "compiled"
    assert plain_core_warning() == ""


def test_plain_core_is_the_default_where_no_compiled_one_was_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index, "IS_COMPILED", False)
    assert isinstance(make_core(1, 10), PlainCore)
    assert default_core_name() == "plain"
    assert "pip install --force-reinstall --no-deps --no-cache-dir" in plain_core_warning()
    with pytest.raises(RuntimeError, match="the compiled core was not built"):
        make_core(1, 10, compiled=True)


def test_import_without_the_compiled_core_finds_the_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "kvstate._core", None)
    assert not importlib.reload(index).IS_COMPILED
    monkeypatch.undo()
    importlib.reload(index)
