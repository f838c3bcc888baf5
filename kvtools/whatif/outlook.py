"""Presents the results of played requests: a table, how many workers can be spared, and a plot."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

from kvtools.whatif.engines import Result
from kvtools.whatif.traces import PROXY, RecordedRequest

_COLORS = (
    "#d62728",
    "#1f77b4",
    "#2ca02c",
    "#9467bd",
    "#8c564b",
    "#7f7f7f",
    "#17becf",
    "#bcbd22",
    "#e377c2",
    "#ff7f0e",
    "#393b79",
    "#637939",
)
_A_LINE = 6  # names in each line above the plot
_LEFT, _WIDTH, _LINE, _TOP = 250, 640, 24, 60
_NAME_LINE = 18


# Results of each policy, one for each seed.
Results = Mapping[str, Sequence[Result]]


class MeasuredResults(NamedTuple):
    """What was measured when the requests were recorded; None for what is unknown.

    requests: how many have measurements. timed: how many have a time to the first token, as answers
    that were streamed have. cached_share: of their prompt tokens, those that engines reported as
    cached. p50, p90, p99: time to the first token, in seconds.
    """

    requests: int
    timed: int
    cached_share: float | None
    p50: float | None
    p90: float | None
    p99: float | None


# What was measured, by who placed the requests: a policy, `PROXY`, or "" if that is not known.
Measured = Mapping[str, MeasuredResults]


def measured_of(recorded: Sequence[RecordedRequest]) -> Measured:
    """Returns what was measured, by who placed the requests, as far as there is anything."""
    names = dict.fromkeys(one.placed_by for one in recorded)
    each = {name: _measured([one for one in recorded if one.placed_by == name]) for name in names}
    return {name: one for name, one in each.items() if one is not None}


def _measured(recorded: Sequence[RecordedRequest]) -> MeasuredResults | None:
    """Returns what was measured, without figures that fewer than half of the lines have.

    Returns None if no figure is left.
    """
    cached = [one for one in recorded if one.cached_tokens is not None]
    times = sorted(
        one.first_token_seconds for one in recorded if one.first_token_seconds is not None
    )
    enough = len(recorded) / 2
    if max(len(cached), len(times)) < enough:
        return None
    share = None
    if len(cached) >= enough:
        share = sum(one.cached_tokens or 0 for one in cached) / sum(one.tokens for one in cached)
    if len(times) < enough:
        return MeasuredResults(len(cached), 0, share, None, None, None)
    at = [times[min(len(times) - 1, int(part * len(times)))] for part in (0.5, 0.9, 0.99)]
    return MeasuredResults(max(len(cached), len(times)), len(times), share, *at)


def mean(results: Sequence[Result]) -> Result:
    """Returns the mean of each figure over the seeds."""
    return Result(*map(fmean, zip(*results, strict=True)))


def p90_of(results: Sequence[Result]) -> float:
    """Returns the mean TTFT p90, in seconds."""
    return mean(results).p90


# Who placed requests, in words, where it was no policy.
_PLACED_BY = {PROXY: "Envoy's own choice", "": "placed as not known"}


def table(results: Results, measured: Measured = MappingProxyType({})) -> str:
    """Returns a table with a line for each policy; times are to the first token.

    What was measured stands below, under names of its own: nothing there is simulated.
    """
    lines = [f"{'simulated':22}  hit share   p50 s   p90 s   p99 s   requests/s"]
    for name, each in results.items():
        one = mean(each)
        times = f"{one.p50:8.3f}{one.p90:8.3f}{one.p99:8.3f}"
        lines.append(f"{name:22}{one.hit_rate:10.1%} {times}{one.throughput:13.2f}")
    if measured:
        lines += ["", f"{'as recorded':22}cached share  p50 s   p90 s   p99 s     requests"]
    for name, recorded in measured.items():
        share = "-" if recorded.cached_share is None else f"{recorded.cached_share:.1%}"
        times = "".join(
            f"{'-':>8}" if one is None else f"{one:8.3f}"
            for one in (recorded.p50, recorded.p90, recorded.p99)
        )
        shown = _PLACED_BY.get(name, name)
        lines.append(f"{shown:22}{share:>10} {times}{recorded.requests:>13}")
    return "\n".join(lines)


# Simulated times are believed if the recorded ones of the same policy differ by no more than this
# factor, p50 and p90, over at least so many requests.
AGREES, LEAST_TIMED = 1.5, 100


def doubt_of(results: Results, measured: Measured, envoy: Sequence[str]) -> str:
    """Returns why the simulated times are not to be believed; "" if recorded ones agree with them.

    envoy: the names of Envoy's own policies, of which the recording does not say which was in use.
    """
    timed = {name: one for name, one in measured.items() if one.timed >= LEAST_TIMED}
    played = {name: [name] if name != PROXY else envoy for name in timed}
    known = {name: [one for one in played[name] if one in results] for name in timed}
    if not any(known.values()):
        return (
            f"no {LEAST_TIMED} recorded requests that a played policy placed have a time to the"
            " first token (of streamed answers)"
        )
    for name, names in known.items():
        if names and not any(_agrees(mean(results[one]), timed[name]) for one in names):
            return (
                f"the recorded times of {_PLACED_BY.get(name, name)} differ from the simulated ones"
                f" by more than a factor of {AGREES:g} (p50, or p90)"
            )
    return ""


def _agrees(played: Result, recorded: MeasuredResults) -> bool:
    pairs = (played.p50, recorded.p50), (played.p90, recorded.p90)
    return all(
        found is not None and ours <= AGREES * found and found <= AGREES * ours
        for ours, found in pairs
    )


def as_json(results: Results) -> dict[str, dict[str, float]]:
    """Returns the means of each policy by name."""
    return {name: mean(each)._asdict() for name, each in results.items()}


class Saving(NamedTuple):
    """How few workers reach the same TTFT p90. It says nothing of throughput, or of memory.

    policy, workers, p90: the policy to compare with, its workers, and its TTFT p90 in seconds.
    ours: the policy with fewer workers. least: how many it needs; None if even as many do not
    suffice.
    """

    ours: str
    policy: str
    workers: int
    p90: float
    least: int | None

    def __str__(self) -> str:
        goal = f"that of {self.policy} with {self.workers} ({self.p90:.3g} s)"
        by = "by the p90 of the time to the first token alone"
        if self.least is None:
            return f"No worker fewer, {by}: {self.ours} with {self.workers} workers misses {goal}."
        fewer = self.workers - self.least
        if not fewer:
            return f"No worker fewer, {by}: {self.ours} needs all {self.workers} for {goal}."
        workers = "worker" if fewer == 1 else "workers"
        return f"{fewer} {workers} fewer, {by}: {self.ours} with {self.least} keeps {goal}."


class IsolationCost(NamedTuple):
    """What it costs if only requests of one tenant share blocks.

    policy: the one that was played. tenants: how many the trace names. shared, apart: its results
    with blocks that all share, and with tenants apart.
    """

    policy: str
    tenants: int
    shared: Result
    apart: Result

    def __str__(self) -> str:
        if not self.tenants:
            return "No line names a `tenant` or `user`: what isolation costs is not known."
        shares = f"{self.apart.hit_rate:.1%} instead of {self.shared.hit_rate:.1%}"
        times = f"{self.apart.p90:.3g} s instead of {self.shared.p90:.3g} s"
        return (
            f"With {self.tenants} tenants apart, {self.policy} has a hit share of {shares}, and a"
            f" TTFT p90 of {times}."
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the figures, and the sentence."""
        results = {"shared": self.shared._asdict(), "apart": self.apart._asdict()}
        return {**self._asdict(), **results, "sentence": str(self)}


def least_workers(most: int, suffices: Callable[[int], bool]) -> int | None:
    """Returns the smallest number of workers that suffices, found by bisection; None if none does.

    suffices: returns whether a number does; more workers are assumed to be no worse.
    """
    if not suffices(most):
        return None
    low, high = 0, most  # low does not suffice, high does
    while high - low > 1:
        middle = (low + high) // 2
        if suffices(middle):
            high = middle
        else:
            low = middle
    return high


def svg(cells: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> str:
    """Returns a plot: a line for each cell, a dot for each policy, in seconds (log scale)."""
    values = [policies[name] for policies in cells.values() for name in names]
    low = math.floor(math.log10(min(values)))
    high = max(low + 1, math.ceil(math.log10(max(values))))

    def x(value: float) -> float:
        return _LEFT + _WIDTH * (math.log10(value) - low) / (high - low)

    top = _TOP + _NAME_LINE * ((len(names) - 1) // _A_LINE)
    height = top + _LINE * len(cells) + 20
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" font-size="12"'
        f' width="{_LEFT + _WIDTH + 30}" height="{height}">'
    )
    parts = [
        head,
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, name in enumerate(names):
        at, line = 20 + number % _A_LINE * 130, 16 + number // _A_LINE * _NAME_LINE
        parts.append(
            f'<circle cx="{at}" cy="{line}" r="5" fill="{_COLORS[number % len(_COLORS)]}"/>'
        )
        parts.append(f'<text x="{at + 9}" y="{line + 4}">{name}</text>')
    for power in range(low, high + 1):
        tick = x(10.0**power)
        parts.append(
            f'<line x1="{tick:.1f}" x2="{tick:.1f}" y1="{top - 10}" y2="{height - 15}"'
            ' stroke="#ddd"/>'
        )
        parts.append(
            f'<text x="{tick:.1f}" y="{top - 14}" text-anchor="middle">{10.0**power:g} s</text>'
        )
    for number, (cell, policies) in enumerate(cells.items()):
        y = top + _LINE * number + 10
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 4}" text-anchor="end">{cell}</text>')
        # the default last, so that it lies on top
        for color, name in reversed(list(zip(itertools.cycle(_COLORS), names, strict=False))):
            parts.append(
                f'<circle cx="{x(policies[name]):.1f}" cy="{y}" r="5" fill="{color}"'
                ' fill-opacity="0.8"/>'
            )
    return "\n".join([*parts, "</svg>", ""])
