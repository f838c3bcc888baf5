"""The list of what the router itself finds wrong."""

import asyncio
import logging
import re
from pathlib import Path

import pytest

from extproc.base.fault import KINDS, Fault
from extproc.observing.faults import MAX_SHOWN, FaultCollector, Faults
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "failures.md"
RULES = ROOT / "deploy" / "prometheus" / "kvsteer.rules.yml"

OPEN = Fault("envoy-fails-open", "envoy", "it fails open")
ALONE = Fault("sharing-alone", "router", "not sharing")


def faults_of(*sources: list[Fault]) -> Faults:
    faults = Faults(lambda: 5.0)
    for source in sources:
        faults.add(lambda source=source: source)  # type: ignore[misc]
    return faults


def test_faults_are_shown_in_the_order_of_their_sources_with_what_to_do() -> None:
    shown = faults_of([OPEN], [ALONE]).as_json()
    assert [one["code"] for one in shown] == ["envoy-fails-open", "sharing-alone"]
    assert shown[1] == {
        "code": "sharing-alone",
        "subject": "router",
        "says": "not sharing",
        "fix": KINDS["sharing-alone"].fix,
        "since": 5.0,
    }


def test_line_names_the_subject_unless_it_is_the_router() -> None:
    assert str(OPEN).startswith("envoy: it fails open; set `failure_mode_allow: false`")
    assert str(ALONE).startswith("not sharing; see that")


def test_no_more_faults_are_shown_than_can_be_read() -> None:
    many = [Fault("envoy-fails-open", f"envoy {n}", "") for n in range(MAX_SHOWN + 1)]
    assert len(faults_of(many).present()) == MAX_SHOWN


def test_look_returns_each_change_once() -> None:
    source = [OPEN]
    faults = faults_of(source)
    assert faults.look() == ([OPEN], [])
    assert faults.look() == ([], [])
    source[:] = [OPEN._replace(says="in other words")]
    assert faults.look() == ([], [])
    source.clear()
    assert faults.look() == ([], [("envoy-fails-open", "envoy")])


def test_time_of_a_fault_is_that_of_its_first_look() -> None:
    times = [7.0]
    faults = Faults(lambda: times[-1])
    faults.add(lambda: [OPEN])
    faults.look()
    times.append(9.0)
    faults.look()
    assert faults.as_json()[0]["since"] == 7.0


async def test_fault_is_logged_when_it_appears_and_when_it_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = [OPEN, ALONE]
    caplog.set_level(logging.INFO, "kvsteer.faults")
    faults = faults_of(source)
    following = asyncio.create_task(faults.follow(0.01))

    async def is_logged(words: str) -> bool:
        return words in caplog.text

    await until(lambda: is_logged("envoy-fails-open: envoy: it fails open"), "it is logged")
    source.clear()
    await until(lambda: is_logged("envoy-fails-open: envoy: has ended"), "its end is logged")
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert caplog.text.count("it fails open") == 1
    assert "sharing-alone" not in caplog.text  # its own part logs it


def test_every_kind_has_a_sample() -> None:
    (family,) = FaultCollector(faults_of([OPEN, OPEN._replace(subject="other")])).collect()
    values = {one.labels["code"]: one.value for one in family.samples}
    assert values.keys() == KINDS.keys()
    assert values["envoy-fails-open"] == 2
    assert sum(values.values()) == 2


def test_kinds_are_documented_with_their_alerts() -> None:
    rows = re.findall(r"^\| `([a-z-]+)` \| .* \| (Kvsteer\w+) \|$", PAGE.read_text(), re.MULTILINE)
    assert dict(rows) == {code: kind.alert for code, kind in KINDS.items()}


def test_faults_with_alerts_of_their_own_do_not_fire_the_common_one() -> None:
    (pattern,) = re.findall(r'kvsteer_faults\{code!~"([^"]+)"\}', RULES.read_text())
    own = {code for code, kind in KINDS.items() if kind.alert != "KvsteerFault"}
    assert {code for code in KINDS if re.fullmatch(pattern, code)} == own
