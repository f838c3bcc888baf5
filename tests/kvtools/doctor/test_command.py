"""`kvsteer doctor` on the command line, and its page in the documentation."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from extproc.__main__ import main
from kvtools.doctor.faults import FAULTS
from tests.ports import free_port

PAGE = Path(__file__).parents[3] / "docs" / "internals" / "faults.md"

TEXT = """\
configuration
  note   configuration: accounting.responses: without usage, the router does not see whether its \
predictions are right, such as those by a feed that is another worker's
model tiny
  note   tokenizer: none is configured: texts are compared, not tokens
envoy ENVOY
  note   envoy: not checked: its admin server does not answer: connection refused; \
--envoy HOST:PORT names another address
worker WORKER
  wrong  http: WORKER/health: connection refused [worker-unreachable]
         fix: start the engine, or correct `endpoint`; a firewall or network policy may block it
  note   feed: tcp://EVENTS: connection refused
  note   replay: none is configured: lost messages cannot be recovered
steering
  wrong  steering: requests are not steered now: no router is ready: ROUTER: Connection refused: \
no router listens there; \
Envoy's admin server at ENVOY did not tell: connection refused [router-down]
         fix: start the router with `kvsteer serve`, and read its log if it ends; \
on another machine, run the doctor beside the router
2 wrong, 0 right, 5 notes; requests are not steered now
"""


@pytest.fixture
def places() -> dict[str, str]:
    return {name: f"127.0.0.1:{free_port()}" for name in ("ENVOY", "WORKER", "EVENTS", "ROUTER")}


@pytest.fixture
def config(tmp_path: Path, places: dict[str, str]) -> str:
    """A configuration file; nothing listens at the addresses in it."""
    worker = {"endpoint": places["WORKER"], "events": {"zmq": f"tcp://{places['EVENTS']}"}}
    content: dict[str, Any] = {
        "models": [{"name": "tiny"}],
        "workers": [worker],
        "envoy": {"admin": places["ENVOY"]},
        "extproc": {"listen": places["ROUTER"]},
    }
    path = tmp_path / "kvsteer.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_doctor_text_names_faults_with_their_fixes(
    config: str, places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--config", config]) == 1
    shown = capsys.readouterr().out
    for name, place in places.items():
        shown = shown.replace(place, name)
    assert shown == TEXT


def test_doctor_json_is_one_object(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--config", config, "--json", "--timeout", "2"]) == 1
    shown = json.loads(capsys.readouterr().out)
    codes = {one["code"] for one in shown["findings"] if one["verdict"] == "wrong"}
    assert codes == {"worker-unreachable", "router-down"}
    assert shown["steering"].startswith("requests are not steered now")
    assert shown["ok"] is False


def test_doctor_exits_otherwise_for_an_unusable_configuration(tmp_path: Path) -> None:
    assert main(["doctor", "--config", str(tmp_path / "none.yaml")]) == 2


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "1e9", "soon"])
def test_doctor_refuses_a_malformed_timeout(
    config: str, seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", "--config", config, f"--timeout={seconds}"])
    assert caught.value.code == 2
    wanted = f"must be a number of seconds above 0 and up to 600, is '{seconds}'"
    assert wanted in capsys.readouterr().err


def test_doctor_faults_are_all_documented_with_their_checks() -> None:
    rows = re.findall(r"^\| ([a-z, ]+) \| [^|]+ \| (`[^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    documented = [
        (code, checks) for checks, codes in rows for code in codes.strip("`").split("`, `")
    ]
    assert {code for code, _ in documented} == FAULTS.keys()
    assert all(FAULTS[code].check in checks.split(", ") for code, checks in documented)
    assert len(documented) == len(FAULTS)


def test_doctor_codes_in_use_equal_the_known_ones() -> None:
    package = Path(__file__).parents[3] / "kvtools" / "doctor"
    source = "".join(path.read_text() for path in package.glob("*.py"))
    used = set(re.findall(r'"([a-z]+(?:-[a-z]+)+)"', source)) & FAULTS.keys()
    assert used == FAULTS.keys()
    literal = set(re.findall(r'\.wrong\(\s*"([\w-]+)"', source))
    assert literal <= FAULTS.keys()
