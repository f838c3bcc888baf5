"""A gateway that is not installed skips its tests, and says what to do."""

from pathlib import Path

import pytest

from tests.gateways.install import PROGRAMS, MissingError, binary, main


def test_a_missing_program_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTEER_GATEWAYS", str(tmp_path))
    with pytest.raises(MissingError, match=r"python -m tests\.gateways\.install envoy-gateway"):
        binary("envoy-gateway")


def test_without_go_that_is_said_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTEER_GATEWAYS", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match="which needs Go"):
        binary("envoy-gateway")
    assert main(["envoy-gateway"]) == 1


def test_a_program_of_another_version_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTEER_GATEWAYS", str(tmp_path))
    for version in (PROGRAMS["aigw"].version, "v0.0.1"):
        place = tmp_path / "aigw" / version / "aigw"
        place.parent.mkdir(parents=True)
        place.touch()
    assert binary("aigw") == tmp_path / "aigw" / PROGRAMS["aigw"].version / "aigw"
    (tmp_path / "aigw" / PROGRAMS["aigw"].version / "aigw").unlink()
    with pytest.raises(MissingError):
        binary("aigw")
