"""The command line of the run under sanitizers, which is read before anything is built."""

import pytest

from tests.sanitize import ROOT, TESTED, chosen


def test_all_tests_of_the_cores_run_unless_some_are_named() -> None:
    assert chosen([]) == TESTED
    assert chosen([TESTED[0], f"{TESTED[1]}::test"]) == [TESTED[0], f"{TESTED[1]}::test"]
    for file, _, name in (one.partition("::") for one in TESTED):
        assert f"def {name}" in (ROOT / "tests" / file).read_text()


def test_help_says_what_may_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        chosen(["--help"])
    assert ended.value.code == 0
    assert TESTED[0] in "".join(capsys.readouterr().out.split())


def test_unknown_test_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        chosen(["kvstate/test_nothing.py"])
    assert ended.value.code == 2
    assert "there is no tests/kvstate/test_nothing.py" in capsys.readouterr().err
