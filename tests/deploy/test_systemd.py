"""The systemd unit is valid and confined, and starts, reloads and stops the router rightly."""

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from extproc.config.schema import Config
from extproc.running.lifetime import STOP_SECONDS
from tests.deploy.manifests import ROOT

UNIT = ROOT / "deploy/systemd/kvsteer.service"


def service() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign] # keeps the case of keys
    unit.read_string(UNIT.read_text())
    return unit["Service"]


def analyzed(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """What systemd-analyze reports on the unit, with its command replaced by one that exists."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("needs systemd-analyze (on Debian: the package systemd)")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/kvsteer/bin/kvsteer", sys.executable))
    return subprocess.run(
        [program, *arguments, str(copy)], capture_output=True, text=True, check=False
    )


def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    done = analyzed(tmp_path, "verify")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_service_is_confined(tmp_path: Path) -> None:
    done = analyzed(tmp_path, "security", "--offline=yes", "--no-pager")
    if "unrecognized option" in done.stderr:
        pytest.skip("systemd-analyze security --offline needs systemd 250 or newer")
    found = re.search(r"Overall exposure level for kvsteer.service: ([\d.]+)", done.stdout)
    assert found is not None, done.stderr
    assert float(found[1]) <= 2.0  # on a scale to 10; 9.6 without any of its settings


def test_service_ends_no_sooner_than_the_router_has_drained() -> None:
    drain_and_leave = (Config().extproc.drain_ms + Config().extproc.leave_ms) / 1_000
    assert float(service()["TimeoutStopSec"]) >= drain_and_leave + STOP_SECONDS


def test_service_reloads_by_sighup_and_does_not_repeat_a_refused_configuration() -> None:
    unit = service()
    assert unit["ExecStart"].split("kvsteer ", 1)[1] == "serve --config /etc/kvsteer/kvsteer.yaml"
    assert unit["ExecReload"] == "/bin/kill -HUP $MAINPID"
    assert unit["Type"] == "exec"  # the router sends no sd_notify
    assert (unit["Restart"], unit["RestartPreventExitStatus"]) == ("always", "2")


def test_envoy_may_open_the_socket_of_the_service() -> None:
    """systemd hides a dynamic user's directories, but not this one unless it is preserved."""
    unit = service()
    assert (unit["DynamicUser"], unit["RuntimeDirectory"]) == ("yes", "kvsteer")
    assert unit.get("RuntimeDirectoryPreserve", "no") == "no"
    assert unit.get("RuntimeDirectoryMode", "0755") == "0755"


def test_systemd_accepts_the_documented_static_user(tmp_path: Path) -> None:
    text = (ROOT / "docs/operations.md").read_text()
    (addition,) = re.findall(r"^```ini\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert "DynamicUser=no\nUser=" in addition
    folder = tmp_path / f"{UNIT.name}.d"
    folder.mkdir()
    (folder / "override.conf").write_text(addition)
    done = analyzed(tmp_path, "verify")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
