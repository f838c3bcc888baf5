"""The list of what the router itself finds wrong."""

import asyncio
import logging
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.fault import KINDS, MAX_SHOWN, Fault
from extproc.observing.faults import FaultCollector, Faults
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "troubleshooting.md"
RULES = ROOT / "deploy" / "prometheus" / "kvsteer.rules.yml"

OPEN = Fault("envoy-fails-open", "envoy", "it fails open")
ALONE = Fault("sharing-alone", "router", "not sharing")


async def faults_of(*sources: list[Fault]) -> Faults:
    faults = Faults(lambda: 5.0)
    for source in sources:
        faults.add(partial(list, source))
    await faults.look()
    return faults


async def test_faults_are_shown_in_the_order_of_their_sources_with_what_to_do() -> None:
    shown = (await faults_of([OPEN], [ALONE])).as_json()
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


SOURCES = st.lists(
    st.lists(st.tuples(st.sampled_from([*KINDS]), st.integers(0, 40)), max_size=60), max_size=4
)


@given(SOURCES)
async def test_the_first_faults_are_shown_in_the_order_of_their_sources(
    sources: list[list[tuple[str, int]]],
) -> None:
    told = [[Fault(code, f"worker {n}", "") for code, n in source] for source in sources]
    once = dict.fromkeys(fault for source in told for fault in source)
    assert (await faults_of(*told)).present() == [*once][:MAX_SHOWN]


async def test_look_returns_each_change_once() -> None:
    source: list[Fault] = []
    faults = Faults(lambda: 5.0)
    faults.add(lambda: source)
    assert await faults.look() == ([], [])
    source.append(OPEN)
    assert faults.present() == []  # only a look asks the sources
    assert await faults.look() == ([OPEN], [])
    assert await faults.look() == ([], [])
    source[:] = [OPEN._replace(says="in other words")]
    assert await faults.look() == ([], [])
    assert faults.present() == source
    source.clear()
    assert await faults.look() == ([], [OPEN._replace(says="in other words")])


async def test_time_of_a_fault_is_that_of_its_first_look() -> None:
    times = [7.0]
    faults = Faults(lambda: times[-1])
    faults.add(lambda: [OPEN])
    await faults.look()
    times.append(9.0)
    await faults.look()
    assert faults.as_json()[0]["since"] == 7.0


async def test_source_that_fails_hides_no_other_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    faults, is_well = Faults(lambda: 5.0), [False]

    def failing() -> list[Fault]:
        if not is_well[-1]:
            raise ValueError
        return [ALONE]

    faults.add(failing)
    faults.add(lambda: [OPEN])
    await faults.look()
    await faults.look()
    assert faults.present() == [OPEN]
    assert caplog.text.count("faults could not be looked for: ValueError") == 1
    is_well.append(True)
    await faults.look()
    assert faults.present() == [ALONE, OPEN]


async def test_fault_is_logged_when_it_appears_and_when_it_has_ended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source = [OPEN, ALONE]
    caplog.set_level(logging.INFO, "kvsteer.faults")
    faults = Faults(lambda: 5.0)
    faults.add(lambda: source)
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


async def test_others_have_a_turn_where_a_source_says_so() -> None:
    order: list[str] = []

    def source() -> Iterator[Fault | None]:
        order.append("begun")
        yield None
        order.append("ended")

    async def other() -> None:
        order.append("other")

    faults = Faults(lambda: 5.0)
    faults.add(source)
    await asyncio.gather(faults.look(), other())
    assert order == ["begun", "other", "ended"]


async def test_every_kind_has_a_sample() -> None:
    faults = await faults_of([OPEN, OPEN._replace(subject="other")])
    (family,) = FaultCollector(faults).collect()
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
