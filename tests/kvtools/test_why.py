from typing import Any

import pytest

from extproc import __main__ as cli
from extproc.commands.admin_json import Break, Misses, Sender, Turn
from extproc.commands.layout import PLAIN, Layout
from kvtools.why import picture, turn_lines
from tests.page.background import in_background
from tests.system.system import running

SAYS = "95% of the tokens computed again come from claude-cli"
TURN = Turn(0.0, "r", 7, 2, "claude-cli", "w1", 100, {"reused": 100}, "100 of 100 were reused")


def sender(client: str, **fields: Any) -> Sender:
    tokens = {"reused": 10, "changed": 80, "new": 10}
    known: dict[str, Any] = {"tokens": tokens, "saved_seconds": 0.1, "again_seconds": 1.26}
    known |= {"again_tokens": 80, "cause": "changed"}
    known |= {"model": "m", "client": client, "tenant": "", "turns": 3, "prompt_tokens": 100}
    return Sender(**known | fields)


def misses(**fields: Any) -> Misses:
    return Misses(enabled=True, seconds=3_725.0, tokens={"reused": 10, "changed": 90}, **fields)


def test_who_breaks_the_cache_comes_first() -> None:
    lines = picture(misses(breaks=[Break(SAYS)], clients=[sender("a")], turns=[TURN]), PLAIN)
    assert lines[0] == SAYS
    assert (
        lines[2]
        == "100 prompt tokens in 1 h 2 min, since the router started, by what became of them:"
    )
    assert lines[3].split()[:3] == ["changed", "90", "90.0%"]
    assert lines[3].endswith("again: the client changed its prompt before them")
    assert lines[-1] == "00:00:00 claude-cli, conversation 7, turn 2, w1: 100 of 100 were reused"


def test_clients_are_shown_with_what_they_cost() -> None:
    priced = sender("a", tenant="0badcafe", again_price=0.00034)
    lines = picture(misses(clients=[priced, sender("b", again_tokens=0, cause="")]), PLAIN)
    (first, second) = [line.split() for line in lines if line.startswith(("a ", "b "))]
    assert first == [
        "a",
        "(0badcafe)",
        "m",
        "3",
        "100",
        "10.0%",
        "80.0%",
        "1.3",
        "s",
        "0.00034",
        "changed",
    ]
    assert second[-2:] == ["0", "-"]
    assert "PRICE" not in "".join(picture(misses(clients=[sender("a")]), PLAIN))


def test_terminal_gets_bars_and_no_escapes_of_clients() -> None:
    lines = picture(misses(clients=[sender("a\x1b[31m")]), Layout(has_colours=True, marks="#."))
    assert "#" * 22 in lines[3]
    assert not any("a\x1b" in line for line in lines)
    assert turn_lines([TURN])[0].startswith("00:00:00 ")


@pytest.mark.parametrize("tokens", [{}, {"reused": 0}])
def test_router_that_has_judged_nothing_yet_says_so(tokens: dict[str, int]) -> None:
    assert picture(Misses(enabled=True, tokens=tokens), PLAIN) == [
        "No request with known tokens has ended yet."
    ]


def test_command_names_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    with in_background(running(1, ("tiny",))) as system:
        assert cli.main(["why", "--admin", system.it.admin]) == 1
    assert "set `misses: {enabled: true}`" in capsys.readouterr().err
    with in_background(running(1, ("tiny",), {"misses": {"enabled": True}})) as system:
        assert cli.main(["why", "--admin", system.it.admin]) == 0
        assert cli.main(["why", "no-such-request", "--admin", system.it.admin]) == 1
        assert cli.main(["why", "12", "--admin", system.it.admin]) == 1
    said = capsys.readouterr()
    assert said.out == "No request with known tokens has ended yet.\n"
    assert "no verdict of 'no-such-request' is kept" in said.err
