from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.features.misses.change import Kind
from extproc.features.misses.partition import Cause, Held
from extproc.features.misses.sender import Sender
from extproc.features.misses.verdicts import Change, Verdict, as_json, clock_time, in_words, told

CLOCK = Change(212, "system", 0, "system", Kind.TIME)
BROKEN = Held(9_000, 208, 16, last=8_000, kept=212)


def verdict(held: Held, change: Change | None = None, because: str = "") -> Verdict:
    return Verdict(3, 0.0, "r", Sender("m", "claude-cli", ""), "w1", 5, 7, held, change, because)


def test_verdict_says_what_changed_where_and_what_it_cost() -> None:
    said = in_words(verdict(BROKEN, CLOCK))
    assert said == (
        "208 of 9,000 prompt tokens were reused; at token 212, in the system prompt, a date or time"
        " changed, so 7,788 tokens were computed again; 4 are behind the last whole block;"
        " 1,000 are new"
    )


def test_verdict_says_more_of_the_main_cause_besides_a_change() -> None:
    held = Held(9_000, 0, 16, last=8_000, kept=8_000, gone=Cause.EVICTED)
    said = in_words(verdict(held, because="by w1 at 12:00:00 UTC"))
    assert "8,000 were evicted (by w1 at 12:00:00 UTC)" in said
    both = in_words(verdict(replace(held, elsewhere=160), because="because"))
    assert "160 are held by another worker;" in both


def test_places_of_changes_in_words() -> None:
    assert Change(5).in_words == "at token 5, the prompt changed"
    turn = Change(5, "turn", 16, "tool", Kind.REWRITTEN)
    assert turn.in_words == "at token 5, in turn 17 (tool), the text was rewritten"
    assert Change(5, "tools", 2).where == "token 5, in tool 3"
    assert Change(5, "template").where == "token 5, in what the template writes"
    assert Change(5, "turn").where == "token 5, in turn"


def test_verdict_as_json_has_all_numbers() -> None:
    shown = as_json(verdict(BROKEN, CLOCK))
    assert shown["tokens"] == {"reused": 208, "block": 4, "changed": 7_788, "new": 1_000}
    assert shown["cause"] == "changed"
    assert shown["change"] == {
        "at_token": 212,
        "part": "system",
        "index": 0,
        "role": "system",
        "kind": "time",
    }
    plain = as_json(verdict(Held(10, 0)))
    assert (plain["cause"], plain["change"]) == ("", None)
    assert as_json(verdict(BROKEN, Change(212)))["change"]["kind"] is None


def test_client_is_told_of_its_own_last_prompt() -> None:
    said = dict(told(verdict(BROKEN, CLOCK)))
    assert said["x-kvsteer-overlap-tokens"] == "208"
    assert said["x-kvsteer-miss"] == "changed; tokens=7788; at=212; part=system; index=0; kind=time"
    unseen = dict(told(verdict(BROKEN, Change(212))))
    assert unseen["x-kvsteer-miss"] == "changed; tokens=7788; at=212; part=unknown"
    whole = Held(9_000, 8_000, 16, last=8_000, kept=8_000)
    assert told(verdict(whole)) == [("x-kvsteer-overlap-tokens", "8000")]
    gone = replace(whole, reused=0, gone=Cause.CLEARED)
    assert dict(told(verdict(gone)))["x-kvsteer-miss"] == "cleared; tokens=8000"


TOKENS = st.integers(0, 5_000)


@given(st.integers(1, 5_000), TOKENS, st.none() | TOKENS, TOKENS)
def test_client_is_never_told_what_others_cached(
    prompt: int, reused: int, last: int | None, kept: int
) -> None:
    own = Held(prompt, min(reused, kept), 16, last=last, kept=kept)
    assert told(verdict(own)) == told(verdict(replace(own, reused=reused)))
    if last is None:
        assert not told(verdict(own))


def test_times_are_of_the_day_in_utc() -> None:
    assert clock_time(43_200.5) == "12:00:00"
