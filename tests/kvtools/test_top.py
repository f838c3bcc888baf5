import contextlib
import io
import os
import pty
import re
import select
import subprocess
import sys
import termios
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest

from extproc.base.errors import StartError
from extproc.commands.admin_json import Api, Decision, History, ModelContexts, Routers, Worker
from extproc.commands.layout import PLAIN, Layout, width
from kvtools import top
from kvtools.top import HELP, LEAST, run
from tests.extproc.admin.serving import serving
from tests.page.background import in_background
from tests.ports import free_port


class Terminal(io.StringIO):
    """A terminal that is interrupted after this many draws."""

    def __init__(self, draws: int, after_first: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._draws = draws
        self._after_first = after_first

    def isatty(self) -> bool:
        return True

    def flush(self) -> None:
        self._draws -= 1
        if self._draws == 0:
            raise KeyboardInterrupt
        self._after_first()


def test_top_once_shows_fleet_and_decisions() -> None:
    shown = io.StringIO()
    with in_background(serving()) as served:
        served.do(served.it.route(30))
        assert run(served.it.url, once=True, out=shown) == 0
    lines = shown.getvalue().splitlines()
    assert lines[0] == "1 worker: 1 unsupported; 1 in flight; - of prompt tokens certainly held"
    assert "\x1b" not in shown.getvalue()
    assert lines[-1].split()[1:5] == ["127.0.0.1:1", "0/30", "0%", "nothing_cached"]


def test_top_draws_a_terminal_until_interrupted_and_restores_it() -> None:
    terminal = Terminal(draws=1)
    with in_background(serving()) as served:
        assert run(f"{served.it.url}/", once=False, out=terminal) == 0
    shown = terminal.getvalue()
    assert shown.startswith("\x1b[?1049h")
    assert "1 worker: 1 unsupported" in shown
    assert shown.endswith("\x1b[?25h\x1b[?1049l")


def test_top_without_a_terminal_runs_once() -> None:
    shown = io.StringIO()
    with in_background(serving()) as served:
        run(served.it.url, once=False, out=shown)
    assert "no request yet" in shown.getvalue()


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:{port}", "no url", "http://[", "http://127.0.0.1:abc", "http://a b"]
)
def test_top_names_an_unreachable_router_in_one_line(url: str) -> None:
    with pytest.raises(StartError, match=r"^top: .*/decisions: "):
        run(url.format(port=free_port()), once=True, out=io.StringIO())


def test_top_wraps_the_error_of_a_lost_router(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(in_background(serving()))
        terminal = Terminal(draws=2, after_first=stack.close)
        assert run(served.it.url, once=False, out=terminal, refresh_seconds=0.0) == 0
    shown = terminal.getvalue().replace("\x1b[K\n", " ")
    assert re.search(r"/decisions: .* no router runs there; .* --admin trying again", shown)


WIDE = (200, 0)


def speed(own: int, used: int, confidence: float) -> dict[str, float]:
    words = ("tokens_per_second", "used_tokens_per_second", "confidence")
    return dict(zip(words, (own, used, confidence), strict=True))


def worker(name: str, state: str = "live", reason: str = "") -> dict[str, Any]:
    feed = {"reason": reason}
    tiers = {"device": 12, "host": 3, "disk": 0, "remote": 0}
    return {
        "name": name,
        "endpoint": name,
        "state": state,
        "reason": "",
        "feeds": [feed],
        "blocks_by_tier": tiers,
        "in_flight": 2,
        "speed": speed(8_000, 8_000, 0.0),
        "draining": False,
        "down": "",
        "astray": "",
        "excluded": "",
        "source_fault": "",
        "engine": None,
    }


def decision(number: int, *pick: str) -> dict[str, Any]:
    return {
        "at": number,
        "pick": list(pick),
        "worker": pick[0] if pick else "",
        "policy": "cost",
        "steered": True,
        "served": "",
        "prefill": None,
        "predicted_tokens": 16,
        "uncertain_tokens": 0,
        "approximate_tokens": 0,
        "prompt_tokens": 40,
        "weighed_tokens": 40,
        "reason": "overlap",
        "decided_by": "cache",
        "why": f"cost: {[*pick, 0][0]} is expected to hold 16 of 40 prompt tokens",
    }


def screen(
    workers: list[dict[str, Any]],
    decisions: list[dict[str, Any]],
    size: tuple[int, int],
    *,
    events_enabled: bool,
    history: Any = None,
    routers: Any = None,
    apis: Any = (),
    contexts: Any = (),
    layout: Layout = PLAIN,
) -> list[str]:
    """What is shown of these answers."""
    return top.screen(
        msgspec.convert(workers, list[Worker]),
        msgspec.convert(decisions, list[Decision]),
        size,
        events_enabled=events_enabled,
        history=msgspec.convert(history, History | None),
        routers=msgspec.convert(routers, Routers | None),
        apis=msgspec.convert(apis, list[Api]),
        contexts=msgspec.convert(contexts, list[ModelContexts]),
        layout=layout,
    )


def shown_of(
    workers: list[dict[str, Any]],
    decisions: list[dict[str, Any]],
    size: tuple[int, int],
    *,
    on: bool = True,
    contexts: Sequence[dict[str, str]] = (),
) -> list[str]:
    return screen(workers, decisions, size, events_enabled=on, contexts=contexts)


def test_screen_shows_workers_and_decisions() -> None:
    assert shown_of(
        [worker("a:1")],
        [decision(5, "a:1", "b:1"), decision(6) | {"why": "none of them may"}],
        WIDE,
    ) == [
        "1 worker: 1 live; 2 in flight",
        "",
        "WORKER  FEED  BLOCKS  RUN  HELD  TIERS, REASON",
        "a:1     live      15    2     -  device 12; host 3",
        "",
        "TIME       PICKED  HELD/PROMPT  SHARE  REASON   WHY",
        "00:00:06Z  -             16/40    40%  overlap  none of them may",
        "00:00:05Z  a:1           16/40    40%  overlap  hold 16 of 40 prompt tokens",
    ]


def test_screen_shows_the_hit_rate_of_each_worker_and_the_fleet() -> None:
    def series(*held: int | None) -> dict[str, Any]:
        return {"prompt_tokens": [100, None, 100], "predicted_tokens": held}

    history = {"fleet": series(60, None, 20), "workers": {"a:1": series(100, None, 90)}}
    fleet = [worker("a:1"), worker("b:1")]
    lines = screen(fleet, [], WIDE, events_enabled=True, history=history)
    assert lines[0].endswith("; 40% of prompt tokens certainly held")
    reported = {"answered_tokens": [100, None, 100], "reported_tokens": [70, None, 40]}
    known = history | {"fleet": history["fleet"] | reported}
    lines_known = screen(fleet, [], WIDE, events_enabled=True, history=known)
    assert lines_known[0].endswith("; 40% of prompt tokens certainly held, cached share 55%")
    assert [line.split()[4] for line in lines[2:5]] == ["HELD", "95%", "-"]


def test_screen_has_tones_and_bars_where_a_terminal_shows_them() -> None:
    layout = Layout(has_colours=True, marks="#.")
    history = {"fleet": None, "workers": {"a:1": {"prompt_tokens": [8], "predicted_tokens": [4]}}}
    fleet = [worker("a:1"), worker("b:1") | {"down": "gone"}]
    made = [decision(5, "a:1")]
    lines = screen(fleet, made, WIDE, events_enabled=True, history=history, layout=layout)
    shown = "\n".join(lines)
    assert "\x1b[32mlive\x1b[0m" in shown
    assert "\x1b[31mlive\x1b[0m" in shown
    assert "50% ####...." in shown
    assert "40% ###....." in shown
    assert all(width(line) <= WIDE[0] for line in lines)
    narrow = screen(fleet, made, (60, 24), events_enabled=True, history=history, layout=layout)
    assert "####" not in "\n".join(narrow)


def test_screen_shows_the_share_of_requests_with_known_tokens_by_api() -> None:
    chat = {"api": "chat", "requests": 4, "keyed": 4, "reasons": {}}
    reasons = {"unsupported_tools": 2, "no_body": 1}
    messages = {"api": "messages", "requests": 4, "keyed": 1, "reasons": reasons}
    lines = screen([worker("a:1")], [], (80, 24), events_enabled=True, apis=[chat, messages])
    assert lines[1] == "tokens known: chat 100%, messages 25% (unsupported_tools)"


def test_screen_shows_the_share_of_the_record_of_texts() -> None:
    by = decision(5, "a:1") | {"reason": "no_tokenizer", "predicted_tokens": 0}
    by |= {"decided_by": "texts", "approximate_tokens": 30, "prompt_tokens": 0}
    assert shown_of([worker("a:1")], [by], (80, 24))[-1].split()[2:] == [
        "~30/40",
        "~75%",
        "texts:",
        "no_tokenizer",
    ]


@pytest.mark.parametrize(
    ("certain", "uncertain", "approximate", "held"),
    [(16, 0, 0, "16/40"), (0, 0, 0, "0/40"), (16, 16, 0, "~32/40"), (0, 0, 8, "~8/40")],
)
def test_screen_marks_what_a_worker_held_probably(
    certain: int, uncertain: int, approximate: int, held: str
) -> None:
    by = decision(5, "a:1") | {"predicted_tokens": certain, "uncertain_tokens": uncertain}
    by |= {"approximate_tokens": approximate}
    assert shown_of([worker("a:1")], [by], (80, 24))[-1].split()[2] == held


def test_screen_of_80_columns_shows_worker_share_and_reason() -> None:
    named = worker("worker-1:8000") | {"endpoint": "172.18.0.4:8000"}
    picked = decision(5, "172.18.0.4:8000") | {"worker": "worker-1:8000"}
    lines = shown_of([named], [picked], (80, 24))
    assert lines[-1].split() == ["00:00:05Z", "worker-1:8000", "16/40", "40%", "overlap"]
    assert lines[3].startswith("worker-1:8000  live")
    wide = shown_of([named], [picked], (130, 24))
    assert wide[3].startswith("worker-1:8000 (172.18.0.4:8000)  live")
    assert "worker-1:8000 (172.18.0.4:8000)" in wide[-1]
    assert wide[-1].endswith("overlap  hold 16 of 40 prompt tokens")
    assert max(map(len, HELP)) <= 80


def test_top_explains_and_quits_by_key_and_restores_the_terminal() -> None:
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    with in_background(serving()) as served:
        top = subprocess.Popen(
            [sys.executable, "-m", "extproc", "top", "--admin", served.it.url],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "COLUMNS": "80", "LINES": "24"},
        )
        read_until(ours, "q quits  ? explains")
        os.write(ours, b"?")
        read_until(ours, "any key  refreshes at once")
        os.write(ours, b"?")
        read_until(ours, "1 worker: 1 unsupported")
        os.write(ours, b"q")
        assert top.wait(10) == 0
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


def read_until(terminal: int, words: str) -> None:
    shown = ""
    while words not in shown:
        assert select.select([terminal], [], [], 30)[0], shown
        shown += os.read(terminal, 65536).decode()


def test_screen_names_the_prefill_worker() -> None:
    lines = shown_of([worker("a:1")], [decision(5, "a:1") | {"prefill": "p:1"}], WIDE)
    assert "a:1, prompt by p:1 " in lines[-1]


def test_screen_names_the_served_endpoint_if_not_the_pick() -> None:
    strayed = decision(5, "a:1") | {"served": "b:1"}
    astray = worker("a:1") | {"astray": "Envoy does not know it"}
    delivered, picked = decision(6, "a:1") | {"served": "a:1"}, decision(7, "a:1")
    lines = shown_of([astray], [strayed, delivered, picked], WIDE)
    assert "ANSWERED ELSEWHERE: Envoy does not know it" in lines[3]
    assert "a:1, b:1 answered" in lines[-1]
    assert "a:1, answered" in lines[-2]
    assert "answered" not in lines[-3]  # only picked: nobody has reported an answer yet


def test_screen_names_draining_exclusion_and_a_source_fault() -> None:
    said = {"draining": True, "excluded": "not ready", "source_fault": "no answer"}
    shown = shown_of([worker("a:1") | said], [], WIDE)
    assert shown[3].endswith("host 3; draining; not ready; no answer")


def test_screen_lists_feeds_that_are_not_live_first_with_their_reason() -> None:
    shown = shown_of([worker("a:1"), worker("b:1", "stale", "connection lost")], [], WIDE)
    assert shown[0] == "2 workers: 1 live, 1 stale; 4 in flight"
    assert shown[3].split("  ")[0] == "b:1"
    assert shown[3].endswith("connection lost")
    assert shown[-1] == "no request yet"


def test_screen_lists_dead_workers_and_those_without_replay_first() -> None:
    down = worker("b:1") | {"down": "fails its health probe"}
    shown = shown_of([worker("a:1"), down, worker("c:1", "live", "replay failed")], [], WIDE)
    assert shown[0] == "3 workers: 3 live; 1 down; 6 in flight"
    assert [line.split("  ")[0] for line in shown[3:6]] == ["b:1", "c:1", "a:1"]
    assert shown[3].endswith("DOWN: fails its health probe")
    assert shown[4].endswith("replay failed")


def test_screen_shows_what_live_conversations_need_of_the_caches() -> None:
    said = "live contexts fill 150% of the caches; 2 more workers would hold them all"
    one = {"model": "m", "says": said}
    assert said in shown_of([worker("a:1")], [], WIDE, contexts=[one])
    shown = shown_of([worker("a:1")], [], WIDE, contexts=[one, {"model": "n", "says": ""}])
    assert said in shown
    shown = shown_of([worker("a:1")], [], WIDE, contexts=[one, {"model": "n", "says": "x"}])
    assert {f"m: {said}", "n: x"} < set(shown)


def test_screen_shows_that_events_are_disabled() -> None:
    assert shown_of([], [], WIDE, on=False)[0] == "0 workers: none; 0 in flight; EVENTS OFF"


def test_screen_of_a_narrow_terminal_shows_the_essentials() -> None:
    long = "a-worker-with-a-very-long-name.example:8000"
    shown = shown_of([worker(long)], [decision(1, long)], (40, 24))
    assert max(map(len, shown)) <= 40
    assert shown[2].split() == ["WORKER", "FEED", "RUN", "HELD"]
    assert "live" in shown[3]
    assert shown[-1].endswith("16/40")


def test_screen_fits_any_width() -> None:
    shown = shown_of([worker("a" * 99)], [decision(1, "a" * 99)], (1, 9))
    assert max(map(len, shown)) <= LEAST
    assert shown[-1].endswith("16/40")


def test_screen_of_a_large_fleet_leaves_room_for_decisions() -> None:
    fleet = [worker(f"w{number}:1") for number in range(100)]
    shown = shown_of(fleet, [decision(number, "w1:1") for number in range(100)], (100, 20))
    assert len(shown) <= 20
    assert any(line.startswith("... and ") for line in shown)
    assert shown[-1].endswith("overlap")


def test_screen_removes_terminal_controls_from_names() -> None:
    shown = shown_of([worker("\x1b[2Jevil")], [decision(1, "\x07b\n")], WIDE)
    assert all(line.isprintable() for line in shown)


def test_screen_lists_the_other_routers_with_their_age() -> None:
    def line(**output: Any) -> str:
        routers = {"alone": "", "routers": [], **output}
        return screen([], [], (200, 0), events_enabled=True, routers=routers)[1]

    assert screen([], [], (200, 0), events_enabled=True)[1] == ""
    assert line() == "shared with no other router yet"
    other = {"name": "b\x1b[2J", "age_ms": 12.4, "in_flight": 3}
    assert line(routers=[other]).startswith("shared with b")
    assert line(routers=[other]).endswith(" (12 ms ago, 3 in flight)")
    assert "\x1b" not in line(routers=[other])
    assert line(alone="redis://a: gone").endswith("decides alone: redis://a: gone")


def test_screen_shows_the_learned_speed_of_a_worker() -> None:
    known = worker("10.0.0.1:1") | {"speed": speed(16_000, 16_000, 0.9)}
    even = worker("10.0.0.2:1") | {"speed": speed(7_900, 8_000, 0.5)}
    shown = "\n".join(shown_of([known, even, worker("10.0.0.3:1")], [], WIDE))
    assert shown.count("tok/s") == 3
    assert "16000 tok/s" in shown
    assert "7900 tok/s; costs use 8000 tok/s" in shown
    assert shown.count("costs use") == 1


def test_top_shows_unsteered_requests_and_served_endpoints() -> None:
    shown = io.StringIO()
    with in_background(serving()) as served:
        served.it.router.steering.change(12.5)
        served.do(served.it.route(30))
        served.it.router.steering.change(0)
        served.do(served.it.route(40))
        kept = served.it.observations.recent.newest_after(0)
        served.it.observations.note_server(kept[-1].decision, "127.0.0.1:1")
        assert run(served.it.url, once=True, out=shown) == 0
    lines = shown.getvalue().splitlines()
    assert lines[1] == "STEERS 0 % of the requests; the proxy chooses for the others"
    (newest,) = [line for line in lines if "0/40" in line]
    assert "127.0.0.1:1 (not steered), answered" in newest
