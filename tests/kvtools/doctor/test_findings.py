import json
import re

from hypothesis import given
from hypothesis import strategies as st

from extproc.commands.layout import Layout
from kvtools.doctor.findings import (
    MAX_SAID,
    Severity,
    Subject,
    as_json,
    as_text,
    exit_status,
    name_list,
)

FIRST = Subject("worker 10.0.0.1:8000")
SECOND = Subject("worker 10.0.0.2:8000")
FINDINGS = [
    FIRST.right("http", "/health answers 200"),
    SECOND.note("feed", "nothing was published"),
    FIRST.wrong("events-off", "the worker publishes none"),
]

TEXT = """\
worker 10.0.0.1:8000
  wrong  events: the worker publishes none [events-off]
         fix: turn events on in the engine; the engine's page in docs/ has the flags
  right  http: /health answers 200
worker 10.0.0.2:8000
  note   feed: nothing was published
1 wrong, 1 right, 1 note"""


def test_as_text_has_a_part_for_each_subject_with_its_faults_first() -> None:
    assert as_text(FINDINGS) == TEXT


def test_as_text_tones_verdicts_on_a_terminal() -> None:
    shown = as_text(FINDINGS, Layout(has_colours=True))
    assert "\x1b[31mwrong\x1b[0m" in shown
    assert "\x1b[32mright\x1b[0m" in shown
    assert re.sub(r"\x1b\[[0-9]+m", "", shown) == TEXT


def test_as_json_has_the_order_of_the_text() -> None:
    answer = json.loads(as_json(FINDINGS))
    assert not answer["ok"]
    assert [one["code"] for one in answer["findings"]] == ["events-off", "", ""]
    assert answer["findings"][0]["fix"].startswith("turn events on")
    assert [one["verdict"] for one in answer["findings"]] == ["wrong", "right", "note"]


def test_exit_status_is_1_only_for_wrong_findings() -> None:
    assert exit_status(FINDINGS) == 1
    assert exit_status([one for one in FINDINGS if one.verdict is not Severity.WRONG]) == 0


def test_finding_of_a_peer_has_no_controls_and_a_bounded_length() -> None:
    assert Subject("w").note("feed", "a\x1b[2J\nb").says == "a?[2J b"
    assert len(Subject("w").note("feed", "x" * 10_000).says) == MAX_SAID


def test_name_list_shows_the_first_of_many_names() -> None:
    assert name_list([]) == "nothing"
    assert name_list(["a", "b"]) == "a, b"
    assert name_list([str(one) for one in range(10)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"


@given(st.text(max_size=2 * MAX_SAID))
def test_finding_is_short_and_printable_for_any_peer(said: str) -> None:
    about = Subject("w")
    for one in (
        about.right("feed", said),
        about.note("feed", said),
        about.wrong("events-off", said),
    ):
        assert len(one.says) <= MAX_SAID
        assert one.says.isprintable()
