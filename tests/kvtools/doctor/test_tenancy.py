"""What the doctor says of tenants that are kept apart."""

from pathlib import Path

import pytest

from extproc.base.engine import Engine, Release
from extproc.config.reader import parse
from extproc.config.schema import Config
from kvtools.doctor.findings import Severity, Subject
from kvtools.doctor.tenancy import judge_engine, judge_failure_mode, judge_secret

ABOUT = Subject("it")


def apart(file: Path, rules: str = "") -> Config:
    served = "models: [{name: m}]\nworkers: [{endpoint: '10.0.0.1:1'}]"
    return parse(f"isolation: {{header: h, secret_file: '{file}'{rules}}}\n{served}", "test")


SHARED = parse("models: [{name: m}]\nworkers: [{endpoint: '10.0.0.1:1'}]", "test")


@pytest.mark.parametrize(
    ("secret", "rules", "codes"),
    [
        ("0123456789abcdef", "", [""]),
        ("0123456789abcdef", ", fail: open", ["", ""]),
        ("short", "", ["isolation-secret"]),
        (None, "", ["isolation-secret"]),
    ],
)
def test_secret_is_read_as_the_router_reads_it(
    tmp_path: Path, secret: str | None, rules: str, codes: list[str]
) -> None:
    file = tmp_path / "secret"
    if secret is not None:
        file.write_text(secret)
    assert [one.code for one in judge_secret(apart(file, rules))] == codes


@pytest.mark.parametrize(
    ("name", "release", "verdict"),
    [
        ("vllm", Release(0, 32), Severity.RIGHT),
        ("vllm", Release(0, 16, 4), Severity.WRONG),
        ("sglang", Release(0, 5, 18), Severity.RIGHT),
        ("sglang", Release(0, 5, 17), Severity.WRONG),
        ("trtllm", Release(1, 3), Severity.WRONG),
        (None, Release(0, 0), Severity.NOTE),
    ],
)
def test_engine_has_to_read_salts_and_to_name_them_in_its_events(
    name: str | None, release: Release, verdict: Severity
) -> None:
    engine = None if name is None else Engine(name, release)
    (finding,) = judge_engine(apart(Path("f")), engine, ABOUT)
    assert finding.verdict is verdict


@pytest.mark.parametrize(
    ("rules", "fails_open", "codes"),
    [
        (", fail: closed", True, ["envoy-fails-open"]),
        (", fail: closed", False, []),
        (", fail: open", True, []),
        (", fail: open", False, ["envoy-fails-closed"]),
    ],
)
def test_failure_mode_has_to_be_the_configured_one(
    rules: str, fails_open: bool, codes: list[str]
) -> None:
    found = judge_failure_mode(apart(Path("f"), rules), ABOUT, fails_open=fails_open)
    assert [one.code for one in found] == codes


def test_nothing_is_found_where_tenants_share() -> None:
    assert not [*judge_secret(SHARED), *judge_engine(SHARED, None, ABOUT)]
    assert not [*judge_failure_mode(SHARED, ABOUT, fails_open=True)]
