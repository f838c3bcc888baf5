import json

from extproc.doctor.findings import MAX_SAID, About, Verdict, as_json, as_text, exit_status, shown

FIRST = About("worker 10.0.0.1:8000")
SECOND = About("worker 10.0.0.2:8000")
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


def test_the_text_has_a_part_for_each_subject_with_its_faults_first() -> None:
    assert as_text(FINDINGS) == TEXT


def test_json_has_the_same_in_the_same_order() -> None:
    told = json.loads(as_json(FINDINGS))
    assert not told["ok"]
    assert [one["code"] for one in told["findings"]] == ["events-off", "", ""]
    assert told["findings"][0]["fix"].startswith("turn events on")
    assert [one["verdict"] for one in told["findings"]] == ["wrong", "right", "note"]


def test_only_what_is_wrong_makes_the_exit_status() -> None:
    assert exit_status(FINDINGS) == 1
    assert exit_status([one for one in FINDINGS if one.verdict is not Verdict.WRONG]) == 0


def test_what_a_peer_says_cannot_move_the_cursor_or_fill_the_screen() -> None:
    assert About("w").note("feed", "a\x1b[2J\nb").says == "a?[2J b"
    assert len(About("w").note("feed", "x" * 10_000).says) == MAX_SAID


def test_of_many_names_the_first_are_shown() -> None:
    assert shown([]) == "nothing"
    assert shown(["a", "b"]) == "a, b"
    assert shown([str(one) for one in range(10)]) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
