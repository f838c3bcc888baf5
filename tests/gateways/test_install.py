"""A gateway that is not installed skips its tests, and says what to do."""

from pathlib import Path

import pytest

from tests.gateways.install import PROGRAMS, MissingError, binary, main


def test_missing_program_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTEER_GATEWAYS", str(tmp_path))
    with pytest.raises(MissingError, match=r"python -m tests\.gateways\.install envoy-gateway"):
        binary("envoy-gateway")


def test_missing_go_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTEER_GATEWAYS", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match="which needs Go"):
        binary("envoy-gateway")
    assert main(["envoy-gateway"]) == 1


def test_program_of_another_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTEER_GATEWAYS", str(tmp_path))
    for version in (PROGRAMS["envoy-gateway"].version, "v0.0.1"):
        place = tmp_path / "envoy-gateway" / version / "envoy-gateway"
        place.parent.mkdir(parents=True)
        place.touch()
    assert (
        binary("envoy-gateway")
        == tmp_path / "envoy-gateway" / PROGRAMS["envoy-gateway"].version / "envoy-gateway"
    )
    (tmp_path / "envoy-gateway" / PROGRAMS["envoy-gateway"].version / "envoy-gateway").unlink()
    with pytest.raises(MissingError):
        binary("envoy-gateway")


def test_program_that_is_not_built_here_names_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTEER_GATEWAYS", str(tmp_path))
    place = tmp_path / "pilot-discovery" / PROGRAMS["pilot-discovery"].version
    with pytest.raises(MissingError, match=f"put it at {place}"):
        binary("pilot-discovery")
    assert main(["pilot-discovery"]) == 1
