"""Renders a report: as a text table, and as a self-contained HTML page.

Both show the same data as the JSON of GET /report.
"""

import base64
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from math import log10
from typing import Any

from extproc.observing.comparison import LEAST_REQUESTS, QUANTILES, needed_for
from extproc.observing.interval import BLOCKS
from extproc.observing.report import seconds_at
from extproc.observing.verdict import duration, percent

# A line of the table: its name, a cell for each side that is shown, and the difference.
Line = tuple[str, ...]

# The sides in their order, as columns; the last is shown only where there is one.
_SIDES = {"steered": "steered", "others": "not steered", "cache_unaware": "cache-unaware policy"}
_NOTHING = "-"


def as_text(report: Mapping[str, Any]) -> str:
    """Returns the report for a terminal."""
    lines = [f"Report of {_time(report['at'])}", report["headline"]]
    lines += [f"Note: {note}" for note in report["notes"]]
    for window in _different(report):
        lines += ["", f"{window['name'].capitalize()} ({window_text(window)})", window["headline"]]
        lines += [f"Warning: {warning}." for warning in window["warnings"]]
        if _has_requests(window):
            lines += ["", *_aligned([heads(window), *table(window)])]
        if window["classes"]:
            lines += ["", *_aligned([CLASS_HEADS, *map(_class_line, window["classes"])])]
    return "\n".join([*lines, "", *how_made(report), ""])


def _different(report: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns the windows without those that have the same requests as a shorter one."""
    return [window for window in report["windows"] if window["same_as"] is None]


def _missing_windows(report: Mapping[str, Any]) -> list[str]:
    same = [one for one in report["windows"] if one["same_as"] is not None]
    if not same:
        return []
    names = [one["name"] for one in same]
    listed = " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)
    has = "have" if names[1:] else "has"
    return [f"{listed.capitalize()} {has} no more requests than {same[-1]['same_as']}."]


def how_made(report: Mapping[str, Any]) -> list[str]:
    """Returns sentences on how to read the figures."""
    needed = ", ".join(f"{needed_for(share):,} for {name}" for name, share in QUANTILES.items())
    intervals = (
        f"In brackets: 95 % intervals. They need requests in {BLOCKS} minutes, in long windows in"
        f" {BLOCKS} hours or days, and {LEAST_REQUESTS} of a side, for times to the first byte"
        f" {needed}. If requests of one minute are like those of the minutes before, the first"
        f" intervals are too narrow. Times are right to {report['resolution_percent']:g} %."
    )
    answered = (
        "Shares and times are those of requests that were answered with a status below 400. Cached"
        " tokens are those that engines report, and else those that the worker certainly held."
    )
    return [*_missing_windows(report), intervals, answered]


def _has_requests(window: Mapping[str, Any]) -> bool:
    return any(window[side]["requests"] for side in _SIDES)


def shown_sides(window: Mapping[str, Any]) -> list[str]:
    """Returns the sides that the table of a window shows."""
    return [*_KINDS] if window["cache_unaware"]["requests"] else [*_KINDS][:-1]


def heads(window: Mapping[str, Any]) -> Line:
    """Returns the heads of the columns of a window."""
    sides = shown_sides(window)
    beside = f"difference to {_SIDES[window['compared_with']]}" if len(sides) > 2 else "difference"
    return ("", *(_SIDES[side] for side in sides), beside)


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def window_text(window: Mapping[str, Any]) -> str:
    """Returns when the window began, and for how much of it the router ran."""
    return f"since {_time(window['begins_at'])}, {duration(window['seen_seconds'])} of it seen"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(
            f"{text:{'<' if not at else '>'}{widths[at]}}" for at, text in enumerate(row)
        ).rstrip()
        for row in rows
    ]


def table(window: Mapping[str, Any]) -> Iterator[Line]:
    """Yields the lines of a window."""
    sides, difference = [window[side] for side in shown_sides(window)], window["difference"]

    def line(name: str, shown: Callable[[Mapping[str, Any]], str], apart: str = "") -> Line:
        cells = (shown(side) if side["requests"] else _NOTHING for side in sides)
        return (name, *cells, apart)

    yield line("requests", lambda side: f"{side['requests']:,}")
    yield line("  with known prompt tokens", lambda side: f"{side['requests_with_known_tokens']:,}")
    gain = _difference(difference["cached_share"], _points, " points")
    yield line(
        "cached share of prompt tokens", lambda side: _estimate(side["cached_share"], percent), gain
    )
    yield line("prompt tokens", lambda side: f"{side['prompt_tokens']:,}")
    yield line("  computed", lambda side: f"{side['computed_tokens']:,}")
    if any(side["handed_tokens"] for side in sides):
        yield line("  handed over as ids", lambda side: f"{side['handed_tokens']:,}")
    yield line("  mean per request", lambda side: _number(side["mean_prompt_tokens"]))
    yield line("cached tokens known from", _reported)
    for name in QUANTILES:

        def of_side(side: Mapping[str, Any], name: str = name) -> str:
            return _estimate(side["first_byte_seconds"][name], _seconds)

        apart = _difference(difference["first_byte_seconds"][name], _signed_seconds)
        yield line(f"time to first byte {name}", of_side, apart)
    yield line("no response", lambda side: _part(side, "unanswered"))
    yield line("status 5xx", lambda side: _part(side, "status_5xx"))
    yield line("status 4xx", lambda side: _part(side, "status_4xx"))
    yield line("busiest worker to mean", lambda side: _spread(side, "busiest_to_mean"))
    yield line("variation of load", lambda side: _spread(side, "variation"))
    yield line(
        "prefill time saved per request",
        lambda side: _estimate(side["saved_prefill_seconds_per_request"], _seconds),
        _difference(difference["saved_prefill_seconds_per_request"], _signed_seconds),
    )


CLASS_HEADS = (
    "class",
    "requests",
    "shed",
    "no response or 5xx",
    "cached share",
    *(f"first byte {name}" for name in QUANTILES),
)


def _class_line(one: Mapping[str, Any]) -> list[str]:
    """Returns the line of a class."""
    name, share, times = one["name"], one["cached_share"], one["first_byte_seconds"]
    return [
        "no longer configured" if name is None else name,
        f"{one['requests']:,}",
        f"{one['shed']:,}",
        f"{one['unanswered'] + one['status_5xx']:,}",
        _NOTHING if share is None else percent(share),
        *(_NOTHING if times[word] is None else _seconds(times[word]) for word in QUANTILES),
    ]


def _estimate(
    estimate: Mapping[str, Any] | None, shown: Callable[[float], str], unit: str = ""
) -> str:
    if estimate is None:
        return _NOTHING
    value, low, high = estimate["value"], estimate["low"], estimate["high"]
    if low is None or high is None:
        return f"{shown(value)}{unit} (no interval yet)"
    return f"{shown(value)}{unit} ({shown(low)} to {shown(high)})"


def _difference(
    estimate: Mapping[str, Any] | None, shown: Callable[[float], str], unit: str = ""
) -> str:
    """Returns a difference; if it may be 0, only that none is seen."""
    if (
        estimate is not None
        and estimate["low"] is not None
        and estimate["low"] <= 0 <= estimate["high"]
    ):
        return f"none seen ({shown(estimate['low'])} to {shown(estimate['high'])}{unit})"
    return _estimate(estimate, shown, unit)


def _points(gain: float) -> str:
    return f"{100 * gain:+.1f}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 1 else f"{seconds:.2f} s"


def _signed_seconds(seconds: float) -> str:
    return f"{seconds:+.3f} s"


def _number(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:,.0f}"


def _reported(side: Mapping[str, Any]) -> str:
    reported, predicted = side["cached_tokens_reported"], side["cached_tokens_predicted"]
    return f"{reported:,} reports, {predicted:,} predictions"


def _part(side: Mapping[str, Any], name: str) -> str:
    return f"{side[name]:,} ({percent(side[name] / side['requests'])})"


def _spread(side: Mapping[str, Any], name: str) -> str:
    spread = side["load_spread"]
    if spread is None:
        return "not enough requests yet"
    figure = spread[name]
    return percent(figure) if name == "variation" else f"{figure:.2f} ({spread['workers']} workers)"


STYLE = """
:root {
  color-scheme: light dark;
  --ground: #f6f7f8; --card: #fff; --line: #d9dee3; --text: #18212a; --quiet: #55616d;
  --warn: #8a5a00; --steered: #0b6b6f; --others: #b0570c; --unaware: #6b4fa0;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #11161b; --card: #1a2128; --line: #333d47; --text: #e7ecf0; --quiet: #a3b0bc;
    --warn: #e9bd5b; --steered: #5cc2c2; --others: #f0a060; --unaware: #b79ce8;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--text);
  font: 16px/1.5 system-ui, "DejaVu Sans", sans-serif; overflow-wrap: anywhere; }
header, main { max-width: 72rem; margin: 0 auto; padding: 0 1.25rem; }
h1 { font-size: 1.375rem; margin: 1.25rem 0 0; }
h2 { font-size: 1.0625rem; margin: 0 0 .25rem; }
section { background: var(--card); border: 1px solid var(--line); border-radius: .625rem;
  padding: 1.125rem 1.25rem; margin: 1rem 0; }
p { margin: .25rem 0 .5rem; }
.verdict { font-size: 1.1875rem; max-width: 62ch; }
.quiet { color: var(--quiet); font-size: .875rem; }
.warning { border: 1px solid var(--warn); border-left-width: .3rem; border-radius: .375rem;
  padding: .5rem .75rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .3rem 0 .3rem 1rem; border-top: 1px solid var(--line);
  font-weight: 400; white-space: nowrap; }
th:first-child { text-align: left; padding-left: 0; white-space: normal; }
tbody .inner th { padding-left: 1rem; color: var(--quiet); }
thead th { border-top: 0; color: var(--quiet); font-size: .8125rem; font-weight: 600; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr));
  gap: 1rem; margin-top: 1rem; }
figure { margin: 0; }
figcaption { font-size: .875rem; color: var(--quiet); }
svg { display: block; width: 100%; height: auto; }
@media (max-width: 46rem) {
  header, main { padding: 0 .75rem; }
  section { padding: .875rem; }
  table, tbody { display: block; }
  thead, td:empty { display: none; }
  tr { display: block; border-top: 1px solid var(--line); padding: .4rem 0; }
  th, td { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: 0; }
  td::before { content: attr(data-label); color: var(--quiet); font-size: .8125rem; }
  td { white-space: normal; }
}
svg text { fill: var(--quiet); font-size: 11px; }
.axis { stroke: var(--line); }
.steered { stroke: var(--steered); fill: none; stroke-width: 2; }
.others { stroke: var(--others); fill: none; stroke-width: 2; stroke-dasharray: 5 3; }
.cache_unaware { stroke: var(--unaware); fill: none; stroke-width: 2; stroke-dasharray: 2 3; }
circle.steered { fill: var(--steered); } circle.others { fill: var(--others); }
circle.cache_unaware { fill: var(--unaware); }
rect.steered { fill: var(--steered); stroke: none; }
rect.others { fill: var(--others); stroke: none; }
rect.cache_unaware { fill: var(--unaware); stroke: none; }
.key { display: inline-block; width: 1.25rem; border-top: 2px solid var(--steered);
  vertical-align: middle; }
.key.dashed { border-top: 2px dashed var(--others); }
.key.dotted { border-top: 2px dotted var(--unaware); }
"""

_STYLE_HASH = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()

# The page loads nothing and runs no script; only this style is allowed.
CONTENT_SECURITY_POLICY = (
    f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)


def as_html(report: Mapping[str, Any]) -> str:
    """Returns the report as a page in one file."""
    notes = "".join(f'<p class="warning">{escape(note)}</p>' for note in report["notes"])
    made = "".join(f"<p>{escape(line)}</p>" for line in how_made(report))
    sections = "".join(map(_section, _different(report)))
    unaware = any(window["cache_unaware"]["requests"] for window in report["windows"])
    third = ' &nbsp; <span class="key dotted"></span> those of a cache-unaware policy'
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>KVSteer report</title><style>{STYLE}</style></head><body>\n"
        f"<header><h1>KVSteer report</h1><p class=quiet>{_time(report['at'])}</p></header><main>"
        f'<p class="verdict">{escape(report["headline"])}</p>{notes}'
        '<p class="quiet"><span class="key"></span> steered requests &nbsp; '
        '<span class="key dashed"></span> those left to Envoy&rsquo;s own choice'
        f"{third if unaware else ''}</p>\n"
        f'{sections}<section class="quiet"><h2>How to read it</h2>{made}</section>'
        "</main></body></html>\n"
    )


def _section(window: Mapping[str, Any]) -> str:
    name, warnings = escape(window["name"].capitalize()), window["warnings"]
    notes = "".join(f'<p class="warning">{escape(one)}.</p>' for one in warnings)
    head = (
        f'<section><h2>{name}</h2><p class="quiet">{escape(window_text(window))}</p>'
        f'<p class="verdict">{escape(window["headline"])}</p>{notes}'
    )
    classes = _class_table(window["classes"])
    if not _has_requests(window):
        return f"{head}{classes}</section>\n"
    names = heads(window)
    columns = "".join(f'<th scope="col">{escape(one)}</th>' for one in names)
    rows = "\n".join(_row(line, names) for line in table(window))
    return (
        f'{head}<div class="scroll"><table><thead><tr>{columns}</tr></thead>\n<tbody>{rows}</tbody>'
        f'</table></div>\n{classes}<div class="plots">{_plots(window)}</div></section>\n'
    )


def _class_table(classes: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table of the classes, "" if there are none."""
    if not classes:
        return ""
    heads = "".join(f'<th scope="col">{escape(one)}</th>' for one in CLASS_HEADS)
    rows = "\n".join(_row(_class_line(one), CLASS_HEADS) for one in classes)
    return (
        f'<div class="scroll"><table><thead><tr>{heads}</tr></thead>\n<tbody>{rows}</tbody>'
        "</table></div>\n"
    )


def _row(line: Sequence[str], heads: Sequence[str]) -> str:
    kind = ' class="inner"' if line[0].startswith(" ") else ""
    cells = "".join(
        f'<td data-label="{head}">{escape(one)}</td>'
        for head, one in zip(heads[1:], line[1:], strict=True)
    )
    return f'<tr{kind}><th scope="row">{escape(line[0].strip())}</th>{cells}</tr>'


# The size and margins of a plot, in its own units.
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 340, 190, 44, 10, 10, 24
_KINDS = tuple(_SIDES)

Point = tuple[float, float]


def _x(part: float) -> float:
    return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)


def _y(part: float) -> float:
    return _HEIGHT - _BOTTOM - part * (_HEIGHT - _TOP - _BOTTOM)


def _plots(window: Mapping[str, Any]) -> str:
    steps = len(window["periods"])
    length = duration(steps * window["step_seconds"])
    ends = [(0.0, f"{length} ago"), (1.0, "now")]
    shares = _plot(_share_lines(window["periods"]), ends, "Cached share of prompt tokens by time")
    ticks = [(_place(seconds), text) for seconds, text in _TICKS]
    times = _plot(_time_lines(window), ticks, "Requests with their first byte within a time")
    return shares + times + _worker_bars(window)


_TICKS = ((1e-3, "1 ms"), (1e-2, "10 ms"), (0.1, "0.1 s"), (1.0, "1 s"), (10.0, "10 s"))


def _place(seconds: float) -> float:
    """Returns the position of a time on a logarithmic axis from 1 ms to 100 s, 0 to 1."""
    return min(max((log10(seconds) + 3) / 5, 0.0), 1.0)


def _share_lines(periods: Sequence[Sequence[int]]) -> list[list[Point]]:
    lines: list[list[Point]] = [[] for _ in _KINDS]
    for at, period in enumerate(periods):
        for which in range(len(_KINDS)):
            _, prompt, cached = period[3 * which : 3 * which + 3]
            if prompt:
                lines[which].append(((at + 0.5) / len(periods), cached / prompt))
    return lines


def _time_lines(window: Mapping[str, Any]) -> list[list[Point]]:
    lines: list[list[Point]] = []
    for kind in _KINDS:
        buckets, below, line = window[kind]["first_byte_buckets"], 0, []
        total = sum(count for _, count in buckets)
        for bucket, count in buckets:
            line.append((_place(seconds_at(bucket)), below / total))
            below += count
            line.append((_place(seconds_at(bucket + 1)), below / total))
        lines.append(line)
    return lines


def _plot(lines: Sequence[Sequence[Point]], ticks: Sequence[tuple[float, str]], what: str) -> str:
    drawn = []
    for kind, line in zip(_KINDS, lines, strict=True):
        points = " ".join(f"{_x(x):.1f},{_y(y):.1f}" for x, y in line)
        drawn.append(f'<polyline class="{kind}" points="{points}"/>' if len(line) > 1 else "")
        drawn += [_dot(kind, *line[0])] if len(line) == 1 else []
    return _figure("".join(drawn), ticks, [(0.0, "0 %"), (0.5, "50 %"), (1.0, "100 %")], what)


def _dot(kind: str, x: float, y: float) -> str:
    return f'<circle class="{kind}" cx="{_x(x):.1f}" cy="{_y(y):.1f}" r="3"/>'


def _worker_bars(window: Mapping[str, Any]) -> str:
    """Returns the plot of each side's requests by worker, the busiest first."""
    counts = [window[kind]["requests_by_worker"] for kind in _KINDS]
    parts = [[one / sum(side) for one in side] for side in counts]
    most = max([one for side in parts for one in side], default=1.0)
    width = 1 / max(*map(len, parts), 1)
    bar = 0.8 / max(1, sum(map(bool, parts)))  # of a worker's place
    drawn, at_left = [], 0.1
    for which, kind in enumerate(_KINDS):
        for at, part in enumerate(parts[which]):
            x, height = (at + at_left) * width, part / most
            drawn.append(
                f'<rect class="{kind}" x="{_x(x):.1f}" y="{_y(height):.1f}"'
                f' width="{_x(bar * width) - _x(0):.1f}" height="{_y(0) - _y(height):.1f}"/>'
            )
        at_left += bar if parts[which] else 0.0
    ticks = [(0.0, "busiest"), (1.0, "idlest")]
    sides = [(0.0, "0 %"), (1.0, percent(most))]
    return _figure("".join(drawn), ticks, sides, "Share of each side&rsquo;s requests by worker")


def _figure(
    drawn: str, below: Sequence[tuple[float, str]], beside: Sequence[tuple[float, str]], what: str
) -> str:
    axes = []
    for part, text in beside:
        axes.append(
            f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{_y(part):.1f}"'
            f' y2="{_y(part):.1f}"/><text x="{_LEFT - 4}" y="{_y(part) + 4:.1f}"'
            f' text-anchor="end">{text}</text>'
        )
    for part, text in below:
        anchor = "start" if part == 0 else "end" if part == 1 else "middle"
        axes.append(
            f'<text x="{_x(part):.1f}" y="{_HEIGHT - 6}" text-anchor="{anchor}">{text}</text>'
        )
    return (
        f'<figure><figcaption>{what}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img"'
        f' aria-label="{what}">{"".join(axes)}{drawn}</svg></figure>'
    )
