"""`kvsteer top`: the fleet and the last decisions of a running router, on a terminal."""

import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

from extproc.admin_client import ask
from extproc.config.sections import ALL_PERCENT
from extproc.errors import StartError

# Below this many columns, what is least needed is left out.
NARROW = 72
LEAST = 32
REFRESH_SECONDS = 2.0

# Without a terminal, as many decisions as are of use in a report.
DECISIONS_ONCE = 20

# ECMA-48: cursor to the top left; erase to the end of the line, of the screen; another screen, and
# back (xterm).
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_OTHER_SCREEN, _SCREEN_AGAIN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
Row = Sequence[str]


def run(admin: str, *, once: bool, out: TextIO | None = None) -> int:
    """Shows the router again and again until it is interrupted, or once; returns the exit status.

    admin: the URL of a router's admin server. Output that is no terminal is written once.

    Raises:
        StartError: the router cannot be asked.
    """
    out = sys.stdout if out is None else out
    if once or not out.isatty():
        columns = shutil.get_terminal_size().columns if out.isatty() else 200
        print("\n".join(_asked(admin, (columns, 0))), file=out)
        return 0
    _asked(admin, (80, 24))  # a wrong URL is told in one line, and not on the other screen
    out.write(_OTHER_SCREEN)
    try:
        while True:
            _draw(admin, out)
            time.sleep(REFRESH_SECONDS)
    except KeyboardInterrupt:
        return 0
    finally:
        out.write(_SCREEN_AGAIN)
        out.flush()


def _draw(admin: str, out: TextIO) -> None:
    size = shutil.get_terminal_size()
    try:
        lines = _asked(admin, (size.columns, size.lines))
    except StartError as error:
        lines = [*textwrap.wrap(str(error), size.columns), "trying again; Ctrl-C ends"]
    shown = f"{_END_OF_LINE}\n".join(lines[: size.lines - 1])
    out.write(f"{_HOME}{shown}{_END_OF_LINE}\n{_END_OF_SCREEN}")
    out.flush()


def _asked(admin: str, size: tuple[int, int]) -> list[str]:
    paths = ("/decisions", "/events", "/workers", "/routers", "/steering")
    decisions, events, workers, routers, steering = (ask("top", admin, path) for path in paths)
    try:
        shown = decisions["decisions"][0 if size[1] else -DECISIONS_ONCE :]
        lines = screen(workers, shown, size, events_enabled=events["enabled"], routers=routers)
        return [lines[0], *_steering(steering), *lines[1:]]
    except (KeyError, TypeError, AttributeError) as error:
        raise StartError(f"top: {admin}: answers otherwise than this version does") from error


def screen(
    workers: Sequence[Mapping[str, Any]],
    decisions: Sequence[Mapping[str, Any]],
    size: tuple[int, int],
    *,
    events_enabled: bool,
    routers: Mapping[str, Any] | None = None,
) -> list[str]:
    """Returns the lines to show.

    workers, decisions: as GET /workers and GET /decisions give them, the oldest decision first.
    size: columns and lines of the terminal; 0 lines for no limit. routers: as GET /routers gives
    them, None where nothing is shared.
    """
    columns, lines = max(size[0], LEAST), size[1]
    head = [_summary(workers, events_enabled=events_enabled), *_routers(routers), ""]
    fleet = _workers(workers, columns)
    room = max(len(decisions), 1)
    if lines:
        shown = max(3, lines // 2 - len(head))
        if len(fleet) > shown:
            fleet = [*fleet[: shown - 1], f"... and {len(fleet) - shown + 1} more"]
        room = max(1, lines - len(head) - len(fleet) - 4)
    told = _decisions(decisions[::-1][:room], columns)
    return [_cut(line, columns) for line in [*head, *fleet, "", *told]]


def _summary(workers: Sequence[Mapping[str, Any]], *, events_enabled: bool) -> str:
    states = [str(worker["state"]) for worker in workers]
    told = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states)))
    down = sum(bool(worker["down"]) for worker in workers)
    told += f"; {down} down" if down else ""
    in_flight = sum(worker["in_flight"] for worker in workers)
    switched = "" if events_enabled else "; EVENTS OFF"
    count = f"{len(workers)} worker{'' if len(workers) == 1 else 's'}"
    return f"{count}: {told or 'none'}; {in_flight} in flight{switched}"


def _routers(told: Mapping[str, Any] | None) -> list[str]:
    """Returns a line on the other routers; none where nothing is shared."""
    if told is None:
        return []
    if told["alone"]:
        return [f"ROUTERS NOT HEARD, decides alone: {_plain(told['alone'])}"]
    others = [
        f"{_plain(one['name'])} ({one['age_ms']:.0f} ms ago, {one['in_flight']} in flight)"
        for one in told["routers"]
    ]
    return [f"shared with {', '.join(others) or 'no other router yet'}"]


def _steering(told: Mapping[str, Any]) -> list[str]:
    """Returns lines on what is steered; none where all of it is, and arrives."""
    left = told["percent"] < ALL_PERCENT
    lines = [f"STEERS {told['percent']:g} % of the requests, the proxy chooses for the others"]
    return [*(lines if left else []), *([_plain(told["fault"])] if told["fault"] else [])]


def _workers(workers: Sequence[Mapping[str, Any]], columns: int) -> list[str]:
    by_need = sorted(workers, key=_is_well)
    rows = [_worker(worker, columns) for worker in by_need]
    if columns < NARROW:
        return _table(["WORKER", "FEED", "RUN"], [[row[0], row[1], row[3]] for row in rows], "<<>")
    return _table(["WORKER", "FEED", "BLOCKS", "RUN", "TIERS, REASON"], rows, "<<>><")


def _is_well(worker: Mapping[str, Any]) -> bool:
    lacks = any(feed["reason"] for feed in worker["feeds"])
    return worker["state"] == "live" and not worker["down"] and not lacks


def _worker(worker: Mapping[str, Any], columns: int) -> Row:
    tiers = worker["blocks_by_tier"]
    notes = [f"{tier} {blocks}" for tier, blocks in tiers.items() if blocks]
    notes += [_speed(worker["speed"])]
    reasons = [f"DOWN: {worker['down']}" if worker["down"] else "", worker["reason"]]
    reasons += [feed["reason"] for feed in worker["feeds"]]
    reasons += [f"ANSWERED ELSEWHERE: {worker['astray']}" if worker["astray"] else ""]
    reasons += ["draining" if worker["draining"] else "", worker["excluded"]]
    reasons += [worker["source_fault"]]
    notes = [note for note in (*notes, *reasons) if note]
    name = _plain(worker["name"])
    if columns < NARROW:
        name = _cut(name, columns - 18)
    return [
        name,
        _plain(worker["state"]),
        str(sum(tiers.values())),
        str(worker["in_flight"]),
        _plain("; ".join(notes)),
    ]


def _speed(speed: Mapping[str, Any]) -> str:
    """What was learned of a worker's speed, "" for nothing."""
    if not speed["confidence"]:
        return ""
    return f"{speed['tokens_per_second']} tok/s, {speed['confidence']:.0%} sure"


def _decisions(decisions: Sequence[Mapping[str, Any]], columns: int) -> list[str]:
    if not decisions:
        return ["no request yet"]
    rows = [_decision(one) for one in decisions]
    if columns < NARROW:
        short = [[row[0], _cut(row[1], columns - 26), row[2]] for row in rows]
        return _table(["TIME", "PICKED", "HELD"], short, "<<>")
    return _table(["TIME", "PICKED", "HELD/PROMPT", "REASON", "WHY"], rows, "<<><<")


def _decision(told: Mapping[str, Any]) -> Row:
    at = datetime.fromtimestamp(told["at"], UTC).strftime("%H:%M:%SZ")
    worker = _plain(told["pick"][0]) if told["pick"] else "-"
    if told["prefill"]:
        worker += f", prompt by {_plain(told['prefill'])}"
    if not told["steered"]:
        worker += " (not steered)"
    if told["served"]:  # else nobody told, and a pick is no more than that
        picked = told["pick"] and told["served"] == told["pick"][0]
        worker += ", answered" if picked else f", {_plain(told['served'])} answered"
    held = f"{told['predicted_tokens']}/{told['weighed_tokens']}"
    return [at, worker, held, _plain(told["reason"]), _plain(told["why"])]


def _table(heads: Row, rows: Sequence[Row], sides: str) -> list[str]:
    """Returns lines in columns as wide as their contents, the last one left open."""
    widths = [max(len(row[at]) for row in [heads, *rows]) for at in range(len(heads))]
    return [
        "  ".join(
            f"{text:{side}{width}}" for text, side, width in zip(row, sides, widths, strict=True)
        ).rstrip()
        for row in [heads, *rows]
    ]


def _plain(text: object) -> str:
    """Returns the text without characters that a terminal would obey."""
    return "".join(one if one.isprintable() else "?" for one in str(text))


def _cut(line: str, columns: int) -> str:
    return line if len(line) <= columns else f"{line[: columns - 1]}~"
