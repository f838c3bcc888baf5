"""`kvsteer top`: the fleet and the last decisions of a running router, on a terminal."""

import argparse
import contextlib
import os
import select
import shutil
import sys
import termios
import textwrap
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO, TypeVar

from extproc.base.engine import RUST
from extproc.base.errors import StartError
from extproc.commands.admin_client import ask_for
from extproc.commands.admin_json import (
    Api,
    Decision,
    Decisions,
    Events,
    Fault,
    History,
    ModelContexts,
    Routers,
    Series,
    Speed,
    Steering,
    Worker,
)
from extproc.commands.layout import PLAIN, Layout, Tone, cut, layout_of
from extproc.commands.router_url import add_admin
from extproc.commands.terminal import Row, plain, table
from extproc.config.sections import ALL_PERCENT

T = TypeVar("T")

# On terminals of fewer than NARROW columns, the least important fields are left out; from WIDE on,
# decisions have explanations, and workers their addresses.
NARROW = 72
WIDE = 120
LEAST = 32
BAR_CELLS = 8
REFRESH_SECONDS = 2.0

# How many of the router's faults are shown; GET /faults has all of them.
MAX_FAULTS = 3

# How many decisions are shown without a terminal.
DECISIONS_ONCE = 20

# ECMA-48: cursor to the top left; erase to the end of the line, of the screen; another screen, and
# back (xterm).
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_OTHER_SCREEN, _SCREEN_AGAIN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"

# The last line on a terminal.
KEYS = "q quits  ? explains"

HELP = """\
WORKER   as configured; where there is room, its address stands behind the name
FEED     live: nothing is missing; in any other state (connecting, replaying,
         degraded, stale) some of what the worker holds is uncertain
BLOCKS   cached blocks that KVSteer knows of; RUN: requests in flight
tok/s    prompt tokens that it computes in a second, as learned; until enough
         prompts were seen, costs use a speed between its own and the fleet's
HELD     of the prompt tokens steered there in 15 minutes, the share that the
         worker certainly held; the first line has it for the fleet, and as
         cached share what engines reported

HELD/    prompt tokens that the picked worker certainly held; with ~ those
PROMPT   that it probably held, by events not proved yet or by what was sent
REASON   overlap: it holds the prefix of the prompt; nothing_cached: nobody
         does, so the least busy one was picked; texts: its tokens are not
         known, so texts were compared; docs/metrics.md has the others
The second line has the share of requests of the last 15 minutes whose tokens
are known, by API, and the most frequent reason why others' are not

q        quits, as Ctrl-C does
?        shows this, and then the fleet again
any key  refreshes at once""".splitlines()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options to its parser."""
    parser.set_defaults(run=_run_command)
    add_admin(parser)
    parser.add_argument("--once", action="store_true", help="show the picture once and exit")


def _run_command(arguments: argparse.Namespace) -> int:
    return run(arguments.admin, once=arguments.once)


def run(
    admin: str,
    *,
    once: bool,
    out: TextIO | None = None,
    refresh_seconds: float = REFRESH_SECONDS,
) -> int:
    """Shows the router again and again until it is interrupted, or once; returns the exit status.

    admin: the URL of a router's admin server. Output that is no terminal is written once.

    Raises:
        StartError: the router cannot be asked.
    """
    out = sys.stdout if out is None else out
    if once or not out.isatty():
        columns = shutil.get_terminal_size().columns if out.isatty() else 200
        layout = layout_of(out, os.environ)
        print("\n".join(_fetch_screen(admin, (columns, 0), layout)), file=out)
        return 0
    _fetch_screen(
        admin, (80, 24), PLAIN
    )  # report a wrong URL in one line, not on the alternate screen
    helps = False
    with contextlib.suppress(KeyboardInterrupt), _keyboard() as keyboard:
        out.write(_OTHER_SCREEN)
        try:
            while (key := _drawn(admin, out, keyboard, refresh_seconds, helps=helps)) != "q":
                helps = (key == "?") ^ helps if key else helps
        finally:
            out.write(_SCREEN_AGAIN)
            out.flush()
    return 0


@contextlib.contextmanager
def _keyboard() -> Iterator[int | None]:
    """Yields a descriptor of standard input that delivers each key at once; None if no terminal.

    The terminal's settings are restored when the block ends.
    """
    try:
        keyboard = sys.stdin.fileno()
        before = termios.tcgetattr(keyboard)
    except (OSError, ValueError, AttributeError, termios.error):
        yield None
        return
    try:
        tty.setcbreak(keyboard)
        yield keyboard
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _drawn(
    admin: str, out: TextIO, keyboard: int | None, refresh_seconds: float, *, helps: bool
) -> str:
    """Draws the screen and waits; returns the key that was pressed meanwhile, "" if none."""
    _draw(admin, out, helps=helps)
    if keyboard is None:
        time.sleep(refresh_seconds)
        return ""
    if not select.select([keyboard], [], [], refresh_seconds)[0]:
        return ""
    # end of input, such as after the terminal was closed: quit
    return os.read(keyboard, 64).decode(errors="replace")[:1] or "q"


def _draw(admin: str, out: TextIO, *, helps: bool) -> None:
    size = shutil.get_terminal_size()
    try:
        layout = layout_of(out, os.environ)
        lines = HELP if helps else _fetch_screen(admin, (size.columns, size.lines - 1), layout)
    except StartError as error:
        lines = [*textwrap.wrap(str(error), size.columns), "trying again"]
    lines = [cut(line, size.columns) for line in lines[: size.lines - 2]]
    lines += [""] * (size.lines - 2 - len(lines))
    shown = f"{_END_OF_LINE}\n".join([*lines, cut(KEYS, size.columns)])
    out.write(f"{_HOME}{shown}{_END_OF_LINE}\n{_END_OF_SCREEN}")
    out.flush()


def _fetch_screen(admin: str, size: tuple[int, int], layout: Layout) -> list[str]:
    def get(kind: type[T], path: str) -> T:
        return ask_for(kind, "top", admin, path)

    kind_of_routers: Any = Routers | None  # a union is no type
    decisions = get(Decisions, "/decisions").decisions
    lines = screen(
        get(list[Worker], "/workers"),
        decisions if size[1] else decisions[-DECISIONS_ONCE:],
        size,
        events_enabled=get(Events, "/events").enabled,
        routers=get(kind_of_routers, "/routers"),
        history=get(History, "/history"),
        apis=get(list[Api], "/apis"),
        contexts=get(list[ModelContexts], "/contexts"),
        layout=layout,
    )
    faults, steering = get(list[Fault], "/faults"), get(Steering, "/steering")
    return [lines[0], *_faults(faults, size[0]), *_steering(steering), *lines[1:]]


def screen(
    workers: Sequence[Worker],
    decisions: Sequence[Decision],
    size: tuple[int, int],
    *,
    events_enabled: bool,
    routers: Routers | None = None,
    history: History | None = None,
    apis: Sequence[Api] = (),
    contexts: Sequence[ModelContexts] = (),
    layout: Layout = PLAIN,
) -> list[str]:
    """Returns the lines to show.

    decisions: the oldest first. size: columns and lines of the terminal; 0 lines for no limit.
    routers: None if nothing is shared.
    """
    columns, lines = max(size[0], LEAST), size[1]
    summary = _summary(workers, events_enabled=events_enabled)
    if history is not None:
        summary += f"; {_rate(_share(history.fleet))} of prompt tokens certainly held"
        reported = _cached_share(history.fleet)
        summary += "" if reported is None else f", cached share {_rate(reported)}"
    said = [*_front_ends(workers), *_contexts(contexts), *_keyed(apis), *_routers(routers)]
    head = [summary, *said, ""]
    fleet = _workers(workers, columns, {} if history is None else history.workers, layout)
    room = max(len(decisions), 1)
    if lines:
        shown = max(3, lines // 2 - len(head))
        if len(fleet) > shown:
            fleet = [*fleet[: shown - 1], f"... and {len(fleet) - shown + 1} more"]
        room = max(1, lines - len(head) - len(fleet) - 4)
    last = _decisions(decisions[::-1][:room], columns, layout)
    return [cut(line, columns) for line in [*head, *fleet, "", *last]]


def _summary(workers: Sequence[Worker], *, events_enabled: bool) -> str:
    states = [str(worker.state) for worker in workers]
    counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
    down = sum(bool(worker.down) for worker in workers)
    counts += f"; {down} down" if down else ""
    in_flight = sum(worker.in_flight for worker in workers)
    switched = "" if events_enabled else "; EVENTS OFF"
    count = f"{len(workers)} worker{'' if len(workers) == 1 else 's'}"
    return f"{count}: {counts or 'none'}; {in_flight} in flight{switched}"


def _contexts(models: Sequence[ModelContexts]) -> list[str]:
    """Returns a line for each model whose live conversations fill caches of known size."""
    known = [one for one in models if one.says]
    named = len(known) > 1
    return [plain(f"{one.model}: {one.says}" if named else one.says) for one in known]


def _front_ends(workers: Sequence[Worker]) -> list[str]:
    """Returns a line about the workers behind a Rust front end; none if there is none."""
    engines = [worker.engine for worker in workers]
    found = [one for one in engines if one is not None and one.frontend == RUST]
    kinds = sorted({plain(f"{one.name} {one.version}") for one in found})
    shown = f"{len(found)} of {len(workers)} workers ({', '.join(kinds)})"
    return [f"Rust front end: {shown}"] if found else []


def _keyed(apis: Sequence[Api]) -> list[str]:
    """Returns a line about the APIs by which prompts come; none if there was no request."""
    shown = []
    for one in apis:
        share = f"{one.api} {one.keyed / one.requests:.0%}"
        first = next(iter(one.reasons), "")
        shown.append(f"{share} ({plain(first)})" if first else share)
    return [f"tokens known: {', '.join(shown)}"] if shown else []


def _routers(sharing: Routers | None) -> list[str]:
    """Returns a line about the other routers; none if nothing is shared."""
    if sharing is None:
        return []
    if sharing.alone:
        return [f"NO OTHER ROUTER REACHED, decides alone: {plain(sharing.alone)}"]
    others = [
        f"{plain(one.name)} ({one.age_ms:.0f} ms ago, {one.in_flight} in flight)"
        for one in sharing.routers
    ]
    return [f"shared with {', '.join(others) or 'no other router yet'}"]


def _faults(faults: Sequence[Fault], columns: int) -> list[str]:
    """Returns a line about each of the first faults that the router sees; none without faults."""
    lines = [f"FAULT {plain(one.subject)}: {plain(one.says)}" for one in faults]
    more = len(lines) - MAX_FAULTS
    lines[MAX_FAULTS:] = [f"and {more} more faults: GET /faults"] if more > 0 else []
    return [cut(line, max(columns, LEAST)) for line in lines]


def _steering(steering: Steering) -> list[str]:
    """Returns lines about steering; none if all requests are steered and reach their workers."""
    left = steering.percent < ALL_PERCENT
    lines = [f"STEERS {steering.percent:g} % of the requests; the proxy chooses for the others"]
    return [*(lines if left else []), *([plain(steering.fault)] if steering.fault else [])]


def _share(series: Series | None) -> float | None:
    """Returns the share that was certainly held, None if there were no prompts."""
    return None if series is None else _ratio(series.predicted_tokens, series.prompt_tokens)


def _cached_share(series: Series | None) -> float | None:
    """Returns the share that engines reported as cached, None if they reported none."""
    return None if series is None else _ratio(series.reported_tokens, series.answered_tokens)


def _ratio(part: Sequence[float | None], whole: Sequence[float | None]) -> float | None:
    tokens = sum(filter(None, whole))
    return sum(filter(None, part)) / tokens if tokens else None


def _rate(share: float | None, layout: Layout = PLAIN, about: str = "") -> str:
    """Returns a share in percent and as a bar; "-" for None. about: "~" if it is not certain."""
    if share is None:
        return "-"
    return f"{about}{share:.0%} {layout.bar(share, BAR_CELLS)}".rstrip()


def _workers(
    workers: Sequence[Worker], columns: int, histories: Mapping[str, Series], layout: Layout
) -> list[str]:
    by_need = sorted(workers, key=_is_well)
    layout = layout if columns >= NARROW else layout._replace(marks="")
    rows = [_worker(one, columns, _share(histories.get(one.name)), layout) for one in by_need]
    if columns < NARROW:
        short = [[row[at] for at in (0, 1, 3, 4)] for row in rows]
        return table(["WORKER", "FEED", "RUN", "HELD"], short, "<<>>")
    heads = ["WORKER", "FEED", "BLOCKS", "RUN", "HELD", "TIERS, REASON"]
    return table(heads, rows, "<<>>><")


def _is_well(worker: Worker) -> bool:
    lacks = any(feed.reason for feed in worker.feeds)
    return worker.state == "live" and not worker.down and not lacks


def _worker(worker: Worker, columns: int, share: float | None, layout: Layout) -> Row:
    tiers = worker.blocks_by_tier
    notes = [f"{tier} {blocks}" for tier, blocks in tiers.items() if blocks]
    notes += [_speed(worker.speed)]
    reasons = [f"DOWN: {worker.down}" if worker.down else "", worker.reason]
    reasons += [feed.reason for feed in worker.feeds]
    reasons += [f"ANSWERED ELSEWHERE: {worker.astray}" if worker.astray else ""]
    reasons += ["draining" if worker.draining else "", worker.excluded]
    reasons += [worker.source_fault]
    notes = [note for note in (*notes, *reasons) if note]
    name = _place(worker.name, worker.endpoint, columns)
    if columns < NARROW:
        name = cut(name, columns - 23)
    tone = Tone.BAD if worker.down else Tone.GOOD if _is_well(worker) else Tone.FAIR
    return [
        name,
        layout.tone(plain(worker.state), tone),
        str(sum(tiers.values())),
        str(worker.in_flight),
        _rate(share, layout),
        plain("; ".join(notes)),
    ]


def _place(name: str, endpoint: str, columns: int) -> str:
    """Returns a worker's name, and its address if that differs and there is room."""
    beside = f" ({endpoint})" if endpoint and endpoint != name and columns >= WIDE else ""
    return plain(f"{name}{beside}")


def _speed(speed: Speed) -> str:
    """Returns a worker's learned speed, and the one used for costs; "" if none was learned."""
    if not speed.confidence:
        return ""
    own, used = speed.tokens_per_second, speed.used_tokens_per_second
    return f"{own} tok/s" if used == own else f"{own} tok/s; costs use {used} tok/s"


def _decisions(decisions: Sequence[Decision], columns: int, layout: Layout) -> list[str]:
    if not decisions:
        return ["no request yet"]
    layout = layout if columns >= WIDE else layout._replace(marks="")
    rows = [_decision(one, columns, layout) for one in decisions]
    if columns < NARROW:
        short = [[row[0], cut(row[1], columns - 26), row[2]] for row in rows]
        return table(["TIME", "PICKED", "HELD"], short, "<<>")
    heads = ["TIME", "PICKED", "HELD/PROMPT", "SHARE", "REASON", "WHY"]
    if columns < WIDE:
        short = [[row[0], cut(row[1], columns - 52), *row[2:5]] for row in rows]
        return table(heads[:5], short, "<<>><")
    return table(heads, rows, "<<>><<")


def _reason(decision: Decision) -> str:
    """Returns what decided, for a request without known tokens with why they are not known."""
    reason, by = plain(decision.reason), plain(decision.decided_by)
    return reason if decision.prompt_tokens or not by else f"{by}: {reason}"


def _decision(decision: Decision, columns: int, layout: Layout) -> Row:
    at = datetime.fromtimestamp(decision.at, UTC).strftime("%H:%M:%SZ")
    first = decision.pick[0] if decision.pick else ""
    worker = _place(decision.worker or "-", first, columns)
    if decision.prefill:
        worker += f", prompt by {plain(decision.prefill)}"
    if not decision.steered:
        worker += " (not steered)"
    if decision.served:  # otherwise it is not known who answered
        answered = decision.served == first
        worker += ", answered" if answered else f", {plain(decision.served)} answered"
    held, about = _held(decision)
    whole = decision.weighed_tokens
    rate = _rate(min(1.0, held / whole) if whole else None, layout, about)
    # the earlier columns already show this part
    why = decision.why.removeprefix(f"{decision.policy}: {first} is expected to ")
    return [at, worker, f"{about}{held}/{whole}", rate, _reason(decision), plain(why)]


def _held(decision: Decision) -> tuple[int, str]:
    """Returns the prompt tokens that the worker held, and "~" if that is not certain."""
    certain, approximate = decision.predicted_tokens, decision.approximate_tokens
    if not decision.prompt_tokens:
        return approximate, "~"
    if decision.uncertain_tokens or approximate > certain == 0:
        return max(certain + decision.uncertain_tokens, approximate), "~"
    return certain, ""
