import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.engine import SGLANG, TRTLLM, VLLM, Engine, Release
from extproc.routing.candidates.pins import (
    IGNORED_PINS,
    NO_CHOICE,
    Pin,
    PinFindings,
    RankChoice,
    choice_of,
    pin_of,
)

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
HEADER, FIELD = Pin("x-data-parallel-rank"), Pin("routed_dp_rank", in_body=True)
VLLM_32 = Engine(VLLM, Release(0, 32))


@pytest.mark.parametrize(
    ("engine", "release", "path", "pin"),
    [
        (VLLM, (0, 11, 0), CHAT, None),
        (VLLM, (0, 11, 2), CHAT, HEADER),
        (VLLM, (0, 32, 0), "/v1/messages", HEADER),
        (VLLM, (0, 32, 0), RESPONSES, None),
        (SGLANG, (0, 5, 9), CHAT, Pin("data_parallel_rank", in_body=True)),
        (SGLANG, (0, 5, 9), "/generate", Pin("data_parallel_rank", in_body=True)),
        (SGLANG, (0, 5, 10), CHAT, HEADER),
        (SGLANG, (0, 5, 19), RESPONSES, None),
        (SGLANG, (0, 5, 20), RESPONSES, HEADER),
        (SGLANG, (0, 5, 23), "/generate", FIELD),
        (TRTLLM, (1, 3, 0), CHAT, None),
    ],
)
def test_pin_of_an_engine_depends_on_release_and_path(
    engine: str, release: tuple[int, int, int], path: str, pin: Pin | None
) -> None:
    assert pin_of(Engine(engine, Release(*release)), path) == pin


@given(st.lists(st.booleans(), max_size=30))
def test_findings_refute_a_path_only_while_several_of_the_last_pins_were_ignored(
    obeyed: list[bool],
) -> None:
    findings = PinFindings()
    for is_obeyed in obeyed:
        findings.note(CHAT, is_obeyed=is_obeyed)
    assert findings.is_refuted(CHAT) == (obeyed[-8:].count(False) >= IGNORED_PINS)
    assert not (findings.is_proved(CHAT) and findings.is_refuted(CHAT))
    assert not findings.is_refuted(RESPONSES)
    assert findings.obeyed.get(CHAT, 0) + findings.ignored.get(CHAT, 0) == len(obeyed)
    assert findings.paths == ([CHAT] if obeyed else [])


def test_choice_by_the_table_is_certain_until_it_is_refuted() -> None:
    findings = PinFindings()
    assert choice_of(None, VLLM_32, findings, CHAT) == RankChoice(HEADER, True)
    assert choice_of(None, VLLM_32, findings, RESPONSES) == NO_CHOICE
    assert choice_of(None, None, findings, CHAT) == NO_CHOICE
    for _ in range(IGNORED_PINS):
        findings.note(CHAT, is_obeyed=False)
    assert choice_of(None, VLLM_32, findings, CHAT) == NO_CHOICE


def test_choice_of_a_configured_header_is_certain_once_it_is_proved() -> None:
    findings = PinFindings()
    assert choice_of("x-rank", None, findings, CHAT) == RankChoice(Pin("x-rank"), False)
    assert choice_of("x-data-parallel-rank", VLLM_32, findings, CHAT).is_certain
    for _ in range(IGNORED_PINS):
        findings.note(CHAT, is_obeyed=True)
    assert choice_of("x-rank", None, findings, CHAT).is_certain
