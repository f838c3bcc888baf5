import sys
from importlib import import_module
from pathlib import Path

import pytest

from extproc.base.errors import (
    CallError,
    ConfigError,
    ExtraError,
    RequestError,
    StartError,
    UnknownModelError,
    importing_extra,
)
from kvstate.errors import KVSteerError
from tests.oracles.http2.errors import Http2Error


def test_config_error_lists_all_faults() -> None:
    error = ConfigError(["a: wrong", "b: wrong"])
    assert (str(error), error.faults) == ("a: wrong\nb: wrong", ["a: wrong", "b: wrong"])


def test_request_error_is_its_reason() -> None:
    assert str(RequestError("bad_json")) == RequestError("bad_json").reason == "bad_json"


def test_unknown_model_error_keeps_the_name_out_of_its_text() -> None:
    error = UnknownModelError("secret project")
    assert (error.name, "secret" in str(error)) == ("secret project", False)


def test_errors_have_one_root() -> None:
    assert issubclass(ConfigError, KVSteerError)


def test_protocol_errors_have_the_code_for_the_peer() -> None:
    assert (Http2Error(11, "too much").code, CallError(3, "what").status) == (11, 3)
    assert str(CallError(3, "what")) == "what"


def test_extra_error_names_the_command_that_installs_it() -> None:
    error = ExtraError("workers[0].events.grpc", "grpc")
    assert str(error) == "workers[0].events.grpc: needs the extra: pip install '.[grpc]' in a clone"


def test_importing_extra_names_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkey", None)
    line = r"^sharing.url: needs the extra: pip install '.\[sharing\]' in a clone$"
    with pytest.raises(ExtraError, match=line), importing_extra("sharing.url", "sharing"):
        import_module("valkey")


def test_importing_extra_distinguishes_a_broken_package_from_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "valkey.py").write_text(
        "raise ImportError('libvalkey.so: not found', name='valkey._core')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "valkey", raising=False)
    line = "^sharing.url: valkey is installed, but does not load: libvalkey.so: not found$"
    with pytest.raises(StartError, match=line), importing_extra("sharing.url", "sharing"):
        import_module("valkey")


def test_importing_extra_passes_on_other_missing_modules() -> None:
    with pytest.raises(ModuleNotFoundError), importing_extra("sharing.url", "sharing"):
        import_module("kvstate.nothing_of_this_name")
