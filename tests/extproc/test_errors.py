import sys
from pathlib import Path

import pytest

from extproc.errors import (
    CallError,
    ConfigError,
    ExtraError,
    Http2Error,
    RequestError,
    StartError,
    importing_extra,
)
from kvstate.errors import KVSteerError


def test_a_configuration_error_is_all_its_faults() -> None:
    error = ConfigError(["a: wrong", "b: wrong"])
    assert (str(error), error.faults) == ("a: wrong\nb: wrong", ["a: wrong", "b: wrong"])


def test_a_request_error_is_its_reason() -> None:
    assert str(RequestError("bad_json")) == RequestError("bad_json").reason == "bad_json"


def test_everything_raised_on_purpose_has_one_root() -> None:
    assert issubclass(ConfigError, KVSteerError)


def test_what_a_peer_is_told_has_its_code() -> None:
    assert (Http2Error(11, "too much").code, CallError(3, "what").status) == (11, 3)
    assert str(CallError(3, "what")) == "what"


def test_a_missing_extra_is_named_with_what_installs_it() -> None:
    error = ExtraError("workers[0].events.grpc", "grpc")
    assert str(error) == "workers[0].events.grpc: needs the extra: pip install 'kvsteer[grpc]'"


def test_the_import_of_a_missing_extra_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "valkey", None)
    told = r"^sharing.url: needs the extra: pip install 'kvsteer\[sharing\]'$"
    with pytest.raises(ExtraError, match=told), importing_extra("sharing.url", "sharing"):
        import valkey  # noqa: F401, PLC0415


def test_a_package_that_does_not_load_is_not_taken_for_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "valkey.py").write_text(
        "raise ImportError('libvalkey.so: not found', name='valkey._core')"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "valkey", raising=False)
    told = "^sharing.url: valkey is installed, but does not load: libvalkey.so: not found$"
    with pytest.raises(StartError, match=told), importing_extra("sharing.url", "sharing"):
        import valkey  # noqa: F401, PLC0415


def test_a_missing_module_that_no_extra_brings_is_an_error_of_its_own() -> None:
    with pytest.raises(ModuleNotFoundError), importing_extra("sharing.url", "sharing"):
        import kvstate.nothing_of_this_name  # type: ignore[import-not-found] # noqa: F401, PLC0415
