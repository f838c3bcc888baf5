"""Loads a module as it is where there was no C compiler at installation."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from types import ModuleType

import pytest


def without_core(module: ModuleType, core: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Returns a second copy of a module, for which a compiled core is missing."""
    assert module.__file__ is not None
    spec = spec_from_file_location(f"{module.__name__}_without_core", module.__file__)
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, core, None)
        spec.loader.exec_module(made)
    return made
