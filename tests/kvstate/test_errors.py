import pytest

from kvstate.errors import (
    CORES,
    MAX_PEER_TEXT,
    NotBuiltError,
    ReplayError,
    WireError,
    importing_cores,
    printable,
)


def test_printable_removes_line_breaks_and_escapes_of_a_peer() -> None:
    forged = "busy\n2026-11-22 ERROR kvsteer: all is lost\x1b[2J"
    shown = "busy 2026-11-22 ERROR kvsteer: all is lost?[2J"
    assert printable(forged) == str(WireError(forged)) == str(ReplayError(forged)) == shown


def test_printable_cuts_long_texts_of_a_peer() -> None:
    long = "x" * 40_000_000
    assert len(printable(long)) == len(str(WireError(long))) == MAX_PEER_TEXT
    assert printable(long).endswith("xxx...")
    assert printable("x" * MAX_PEER_TEXT) == "x" * MAX_PEER_TEXT
    assert printable("abcdef", 5) == "ab..."


@pytest.mark.parametrize("core", CORES)
def test_missing_core_is_named_with_the_ways_to_one(core: str) -> None:
    missing = f"the compiled core {core} is missing"
    with pytest.raises(NotBuiltError, match=missing) as caught, importing_cores():
        raise ModuleNotFoundError(f"No module named {core!r}", name=core)
    for way in ("`make demo`", "a wheel", "`docker compose up`"):
        assert way in str(caught.value)


def test_core_that_does_not_load_is_told_with_the_reason() -> None:
    with pytest.raises(NotBuiltError, match="does not load: undefined symbol"), importing_cores():
        raise ImportError("undefined symbol", name="kvstate._core")


def test_other_modules_that_are_missing_are_named_by_python() -> None:
    with pytest.raises(ModuleNotFoundError, match="No module named 'numpy'"), importing_cores():
        raise ModuleNotFoundError("No module named 'numpy'", name="numpy")
