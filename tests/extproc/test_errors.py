from extproc.errors import CallError, ConfigError, ExtraError, Http2Error, RequestError
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
