from extproc.features.misses.breaks import MOST_BREAKS, Break, BreakKey, Breaks, as_json
from extproc.features.misses.change import Kind
from extproc.features.misses.sender import Sender
from extproc.features.misses.verdicts import Change

CLOCK = BreakKey(Sender("m", "claude-cli", ""), "system", 0, Kind.TIME)


def test_changes_of_one_client_at_one_place_are_counted_together() -> None:
    breaks = Breaks()
    for _ in range(41):
        breaks.add(CLOCK, Change(212, "system", 0), 1_000, 0.5)
    other = CLOCK._replace(sender=Sender("m", "codex", "0badcafe"), part=None, kind=None)
    breaks.add(other, Change(10), 300, 0.1)
    breaks.add(other, Change(90), 300, 0.1)
    (worst, found), (least, few) = breaks.worst()
    shown = as_json(worst, found, 100_000)
    assert (shown["turns"], shown["tokens"], shown["share"]) == (41, 41_000, 0.41)
    assert shown["says"] == (
        "41% of the tokens computed again come from claude-cli, in 41 requests: at token 212, in"
        " the system prompt, a date or time changed; 41,000 tokens, about 20.5 s of prefill"
    )
    shown = as_json(least, few, 0)
    assert (shown["at_token"], shown["first_token"], shown["last_token"]) == (None, 10, 90)
    assert "codex (tenant 0badcafe), in 2 requests: at token 10" in shown["says"]
    assert "the prompt changed (and up to token 90);" in shown["says"]


def test_break_that_cost_least_gives_way() -> None:
    breaks = Breaks()
    for number in range(MOST_BREAKS + 5):
        breaks.add(CLOCK._replace(part=number), Change(1), 10 + number, 0.0)
    known = dict(breaks.worst())
    assert len(known) == MOST_BREAKS
    assert CLOCK._replace(part=0) not in known
    assert known[CLOCK._replace(part=MOST_BREAKS + 4)] == Break(1, MOST_BREAKS + 14, 1, 1, 0.0)
