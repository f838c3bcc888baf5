"""Prompts of gpt-oss that vLLM 0.33's Rust front end made, without an engine, are made here too.

vllm_0.33.0_gpt_oss.jsonl: one body a line, with the text of what `vllm-rs render` made of it, its
control tokens by name; null where it refused. Recorded with VLLM_SYSTEM_START_DATE=2026-11-24.
"""

import json
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

from extproc.base.errors import RequestError
from extproc.renderers.harmony import Harmony
from extproc.renderers.harmony_format import CONTROLS
from extproc.requests.prompt import DATE, EVEN_DAY, FRONT_END, ODD_DAY
from tests.extproc.rust.corpus import OF_GPT_OSS, REQUESTS, USER
from tests.extproc.rust.test_recorded_prompts import read

LINES = Path(__file__).with_name("vllm_0.33.0_gpt_oss.jsonl").read_text().splitlines()
ROWS = [json.loads(line) for line in LINES]
NAMES = {number: name for name, number in CONTROLS.items()}
HARMONY = Harmony(lambda: datetime(2026, 11, 24, 12, tzinfo=UTC))

# Why a prompt that the front end makes is not known here.
NOT_KEYED = {
    "unsupported_client_template",
    "unsupported_template_kwargs",
    "unsupported_tool_arguments",
    "unsupported_tools",
}


def prompt(body: dict[str, Any]) -> str:
    assert HARMONY.marks is not None
    joined, forms = HARMONY.render(read(body), budget_seconds=1)
    assert forms & FRONT_END
    segments = HARMONY.marks.split(joined)
    return "".join(NAMES[one] if isinstance(one, int) else one for one in segments)


def test_recording_is_of_the_corpus() -> None:
    assert [row["body"] for row in ROWS] == [*REQUESTS, *OF_GPT_OSS]


def keyed(body: dict[str, Any]) -> str:
    """The prompt, or why there is none."""
    try:
        return prompt(body)
    except RequestError as error:
        return error.reason


def test_prompts_are_the_front_end_s_own() -> None:
    made = [(keyed(row["body"]), row["prompt"]) for row in ROWS if row["prompt"] is not None]
    same = sum(told == theirs for told, theirs in made)
    assert same > 0.9 * len(made)
    assert {told for told, theirs in made if told != theirs} == NOT_KEYED


def test_what_the_front_end_refuses_has_no_prompt() -> None:
    refused = [keyed(row["body"]) for row in ROWS if row["prompt"] is None]
    assert not [one for one in refused if one.startswith("<|start|>")]


@pytest.mark.parametrize("hour", [0, 12, 23])
def test_date_is_a_form_of_its_day_which_the_next_day_has_not(hour: int) -> None:
    now = datetime(2026, 11, 24, hour, 59, tzinfo=UTC)
    chat = read({"messages": [USER]})
    told = set()
    for day in (now, now + timedelta(days=1)):
        harmony = Harmony(partial(next, repeat(day)))
        text, forms = harmony.render(chat, budget_seconds=1)
        assert f"Current date: {day:%Y-%m-%d}" in text
        assert harmony.start_forms == forms & (EVEN_DAY | ODD_DAY)
        assert not forms & DATE
        told.add(harmony.start_forms)
    assert told == {EVEN_DAY, ODD_DAY}
