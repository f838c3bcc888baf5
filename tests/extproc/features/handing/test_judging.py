"""Why ids stay here by what is known of a request alone, and what an engine's count shows."""

from array import array
from typing import Any

import pytest
from msgspec.structs import replace

from extproc.features.handing.judging import is_placed, result_of, traits_of, why_kept
from extproc.observing.outcomes import Outcome
from extproc.observing.usage import Usage
from extproc.proof.samples import AGREED, DISAGREED, FEWER, HANDED, UNKNOWN
from extproc.requests.prompt import CONVERSATION, IN_CODE, TOOLS
from extproc.requests.prompt import GIVEN as GIVEN_FORM
from extproc.requests.request import CHAT_PATH, PLAIN_REQUEST, Head
from extproc.routing.decision import PullSource, Verdict
from extproc.routing.handing import (
    API,
    BODY,
    DIFFERS,
    FEW,
    GIVEN,
    LEGS,
    MEDIA,
    SEVERAL,
    TEXT,
    UNKEYED,
    UNPROVED,
    Handing,
)
from extproc.routing.inputs.query import Media, Query, Variant
from kvstate.overlap import Prompt
from tests.extproc.admin.decisions import decided

PROMPT = Prompt("m", array("I", range(100)))
QUERY = Query("m", [PROMPT], forms=CONVERSATION)
REQUEST = replace(PLAIN_REQUEST, head=Head("POST", CHAT_PATH, None), body=b"{}", reason="")


def kept(request: Any = REQUEST, *, least: int = 50, **changes: Any) -> str:
    query = replace(QUERY, **changes)
    return why_kept(decided(), request, query, least, writes_legs=False)


@pytest.mark.parametrize(
    ("reason", "changes"),
    [
        ("", {}),
        (UNKEYED, {"prompts": ()}),
        (SEVERAL, {"prompts": [PROMPT, PROMPT]}),
        (SEVERAL, {"answers": 2}),
        (MEDIA, {"media": Media([], 1.0, True, 1)}),
        (GIVEN, {"forms": 0}),
        (GIVEN, {"forms": GIVEN_FORM}),
        (TEXT, {"forms": 0, "reads_cache": False}),
        (TEXT, {"needs_text": True}),
        (UNPROVED, {"forms": CONVERSATION | IN_CODE}),
        (FEW, {"least": 101}),
        (DIFFERS, {"variants": [Variant(frozenset("b"), [], 0)]}),
    ],
)
def test_ids_stay_here_for_a_reason(reason: str, changes: dict[str, Any]) -> None:
    assert kept(**changes) == reason


def test_ids_stay_here_where_no_engine_takes_them_or_no_body_may_have_them() -> None:
    assert kept(replace(REQUEST, head=Head("POST", "/generate", None))) == API
    assert kept(replace(REQUEST, body=None)) == BODY


def test_ids_stay_here_where_a_header_tells_of_another_worker() -> None:
    made = replace(decided(), source=PullSource("b:1", 1, 64))
    assert why_kept(made, REQUEST, QUERY, 50, writes_legs=False) == LEGS
    assert why_kept(made, REQUEST, QUERY, 50, writes_legs=True) == ""


def test_only_requests_that_are_placed_count() -> None:
    made = decided()
    assert is_placed(made)
    assert not is_placed(replace(made, is_steered=False))
    assert not is_placed(replace(made, verdict=Verdict.SHED))
    assert not is_placed(replace(made, pick=()))


def test_traits_are_the_path_the_forms_and_the_adapter() -> None:
    assert traits_of(CONVERSATION | TOOLS, CHAT_PATH, None) == (
        CHAT_PATH,
        "conversations",
        "conversations with tools",
    )
    assert traits_of(CONVERSATION, CHAT_PATH, "a")[-1] == "adapter a"


def test_outcome_is_told_in_words_with_its_worker() -> None:
    assert Handing(HANDED).in_words == "its token ids go with it"
    assert Handing(UNPROVED, worker="a:1").in_words.endswith("(a:1)")


def test_tokens_count_as_handed_also_once_the_ids_are_forgotten() -> None:
    assert Handing(HANDED, prompt_tokens=100).handed_tokens == 100
    assert Handing(UNPROVED, prompt_tokens=100).handed_tokens == 0


def outcome(reported: Usage, **changes: Any) -> Outcome:
    found = Outcome("m", "w", False, 200, 0.1, 100, 64, reported, is_comparable=True)
    return found._replace(**changes)


COUNTED = Usage(100, 64, "prompt", 4)


@pytest.mark.parametrize(
    ("result", "reported"),
    [
        (AGREED, COUNTED),
        (DISAGREED, Usage(101, 64, "prompt", 4)),
        (UNKNOWN, Usage()),
        (AGREED, Usage(164, 64, "messages", 4)),  # parts that overlap
        (AGREED, Usage(100, None, "messages", 4)),
        (AGREED, Usage(100, 48, "prompt", 4)),  # a block less
        (FEWER, Usage(100, 32, "prompt", 4)),
        (AGREED, Usage(100, None, "prompt", 4)),
        (DISAGREED, Usage(101, 64, "messages", 4)),
    ],
)
def test_count_of_a_sample_agrees_or_not(result: str, reported: Usage) -> None:
    assert result_of(outcome(reported), 100, 16, is_sample=True) == result


@pytest.mark.parametrize(
    "changes",
    [
        {"is_moved": True},
        {"status": 500},
        {"is_whole": False},
    ],
)
def test_answer_of_another_kind_shows_nothing(changes: dict[str, Any]) -> None:
    assert result_of(outcome(COUNTED, **changes), 100, 16, is_sample=True) == UNKNOWN


def test_request_with_ids_can_only_disagree() -> None:
    assert result_of(outcome(COUNTED), 100, 16, is_sample=False) == UNKNOWN
    assert result_of(outcome(Usage(9, 0, "prompt")), 100, 16, is_sample=False) == DISAGREED
    assert result_of(None, 100, 16, is_sample=True) == UNKNOWN
