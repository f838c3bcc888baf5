"""The content of a report: the figures of its windows for GET /report, and a sentence on each.

Sentences claim no more than their intervals allow. If there is no interval yet, they say what is
missing for one.
"""

from math import sqrt
from typing import Any, NamedTuple

from extproc.observing.comparison import (
    LEAST_REQUESTS,
    QUANTILES,
    Estimate,
    Sides,
    cached_share,
    difference,
    first_byte,
    length_ratio,
    load_spread,
    share_gained,
)
from extproc.observing.report import RESOLUTION, Report, Side

# The default windows, in seconds.
WINDOWS = {
    "the last 10 minutes": 600,
    "the last hour": 3_600,
    "the last day": 86_400,
    "the last 7 days": 604_800,
}

# The sides differ if their mean prompt lengths have this ratio, or their shares this difference.
LENGTHS_DIFFER = 1.2
SHARES_DIFFER = 0.2

# The shares of failures differ if their difference exceeds this many standard deviations, as by
# chance alone only one in several hundred does.
_DEVIATIONS = 3.0

STEERED, OTHERS = "Steered requests", "the others"


class Asked(NamedTuple):
    """What a report should contain: windows by name, in seconds.

    notes: what readers must know about how the report was made.
    """

    windows: dict[str, int]
    notes: tuple[str, ...] = ()


def told(report: Report, asked: Asked, now: float) -> dict[str, Any]:
    """Returns the answer of GET /report as JSON; now: in seconds since 1970."""
    windows = [
        _window(name, Sides.of(report.window(seconds, now)))
        for name, seconds in asked.windows.items()
    ]
    return {
        "at": round(now, 3),
        "headline": _best(windows),
        "notes": list(asked.notes),
        "resolution_percent": round(100 * (RESOLUTION - 1), 1),
        "windows": windows,
    }


def _best(windows: list[dict[str, Any]]) -> str:
    """Returns the name and sentence of the window with the surest difference.

    windows: the shortest first; one with the same requests as a shorter one adds nothing.
    """
    sure: list[dict[str, Any]] = []
    for window in windows:
        if window["is_enough"] and not (sure and _requests(sure[-1]) == _requests(window)):
            sure.append(window)
    found = min(sure, key=_width, default=None)
    if found is None:
        found = next((one for one in windows if one["steered"]["requests"]), windows[-1])
    return f"{found['name'][:1].upper()}{found['name'][1:]}: {found['headline']}"


def _requests(window: dict[str, Any]) -> int:
    return int(window["steered"]["requests"] + window["others"]["requests"])


def _width(window: dict[str, Any]) -> float:
    gain = window["difference"]["cached_share"]
    return float(gain["high"] - gain["low"])


def _window(name: str, sides: Sides) -> dict[str, Any]:
    window, gain = sides.window, share_gained(sides)
    shares = [cached_share(sides, which) for which in (0, 1)]
    figures = [_figures(sides, which, shares[which]) for which in (0, 1)]
    times = [one["first_byte_seconds"] for one in figures]
    return {
        "name": name,
        "step_seconds": window.step_seconds,
        "begins_at": window.begins_at,
        "seen_seconds": round(sum(one.seen_seconds for one in window.periods), 3),
        "is_enough": gain is not None and gain.low is not None,
        "headline": headline(sides, shares, gain),
        "warnings": warnings(sides),
        "steered": {**figures[0], "first_byte_seconds": _shown(times[0])},
        "others": {**figures[1], "first_byte_seconds": _shown(times[1])},
        "difference": {
            "cached_share": gain and gain.shown(),
            "first_byte_seconds": _shown(
                {name: difference(times[0][name], times[1][name]) for name in QUANTILES}
            ),
        },
        "periods": [_period(one.steered, one.others) for one in window.periods],
    }


def _shown(times: dict[str, Estimate | None]) -> dict[str, Any]:
    return {name: one and one.shown() for name, one in times.items()}


def _figures(sides: Sides, which: int, share: Estimate | None) -> dict[str, Any]:
    side = sides.both[which]
    spread = load_spread(side, set(sides.steered.workers) | set(sides.others.workers))
    return {
        "requests": side.requests,
        "unanswered": side.unanswered,
        "status_5xx": side.server_errors,
        "status_4xx": side.client_errors,
        "requests_with_known_tokens": side.known,
        "cached_tokens_reported": side.reported,
        "cached_tokens_predicted": side.known - side.reported,
        "prompt_tokens": side.prompt_tokens,
        "cached_tokens": side.cached_tokens,
        "computed_tokens": side.prompt_tokens - side.cached_tokens,
        "mean_prompt_tokens": round(side.prompt_tokens / side.known, 1) if side.known else None,
        "cached_share": share and share.shown(),
        "first_byte_seconds": {
            name: first_byte(sides, which, quantile) for name, quantile in QUANTILES.items()
        },
        "saved_prefill_seconds": round(side.saved_seconds, 3),
        "load_spread": None
        if spread is None
        else {
            "workers": spread.workers,
            "busiest_to_mean": round(spread.busiest, 3),
            "variation": round(spread.variation, 3),
        },
        "requests_by_worker": sorted(side.workers.values(), reverse=True),
        "first_byte_buckets": [list(one) for one in sorted(side.first_bytes.items())],
    }


def _period(steered: Side, others: Side) -> list[int]:
    """Returns requests, prompt tokens and cached tokens of both sides in one period."""
    return [
        number
        for side in (steered, others)
        for number in (side.requests, side.prompt_tokens, side.cached_tokens)
    ]


def percent(share: float) -> str:
    """Returns a share for people to read: 71 %, 7.1 %, 0.3 %."""
    points = 100 * share
    return f"{points:.0f} %" if abs(points) >= 10 or not round(points, 1) else f"{points:.1f} %"  # noqa: PLR2004


def headline(sides: Sides, shares: list[Estimate | None], gain: Estimate | None) -> str:
    """Returns the result in a sentence, or what is missing."""
    steered, others = sides.both
    if not steered.requests and not others.requests:
        return "No request ended in this time."
    if gain is not None and gain.low is not None and gain.high is not None:
        return _compared(shares, gain.value, gain.low, gain.high)
    alone = [which for which in (0, 1) if sides.both[which].requests]
    if len(alone) == 1:
        return _alone(sides, shares, alone[0])
    few = [which for which in (0, 1) if sides.both[which].known < LEAST_REQUESTS]
    if few:
        missing = " and ".join(
            f"{sides.both[which].known} of {LEAST_REQUESTS} {('steered', 'of the others')[which]}"
            for which in few
        )
        return f"Not enough requests yet with known prompt tokens: {missing}."
    return f"No interval yet: there are enough requests, but {TOO_SHORT}."


# Why there is no interval although there are enough requests.
TOO_SHORT = "they came in too short a time, or nearly all at once"


def _compared(shares: list[Estimate | None], gain: float, low: float, high: float) -> str:
    ours, theirs = (0.0 if one is None else one.value for one in shares)
    told = (
        f"{STEERED} found {percent(ours)} of their prompt tokens cached, {OTHERS} {percent(theirs)}"
        f" (difference {100 * gain:.0f} points, 95 % interval {100 * low:.0f} to {100 * high:.0f})"
    )
    return f"{told}; this may be chance." if low <= 0 <= high else f"{told}."


def _alone(sides: Sides, shares: list[Estimate | None], which: int) -> str:
    """Returns the sentence if all requests are on one side."""
    side, share = sides.both[which], shares[which]
    beside = (
        "All requests were steered, so there is nothing to compare with."
        if which == 0
        else "No request was steered."
    )
    if share is None:
        return f"{side.requests} requests ended, but no prompt tokens are known. {beside}"
    if side.known < LEAST_REQUESTS:
        why = f"{side.known} of {LEAST_REQUESTS} with known prompt tokens"
        return f"Not enough requests yet: {why}. {beside}"
    interval = f"no interval yet: {TOO_SHORT}"
    if share.low is not None and share.high is not None:
        interval = f"95 % interval {100 * share.low:.0f} to {100 * share.high:.0f}"
    who = STEERED if which == 0 else "Requests"
    found = f"found {percent(share.value)} of their prompt tokens cached ({interval})"
    return f"{who} {found}. {beside}"


def warnings(sides: Sides) -> list[str]:
    """Returns other differences of the sides, which make a comparison doubtful."""
    steered, others = sides.both
    if not steered.requests or not others.requests:
        return []
    return [*_lengths(sides), *_failures(steered, others), *_sources(steered, others)]


def _lengths(sides: Sides) -> list[str]:
    ratio = length_ratio(sides)
    if ratio is None or 1 / LENGTHS_DIFFER < ratio.value < LENGTHS_DIFFER:
        return []
    if ratio.low is not None and ratio.high is not None and ratio.low <= 1 <= ratio.high:
        return []
    means = [round(side.prompt_tokens / side.known) for side in sides.both]
    told = (
        f"the sides differ in prompt length: on average {means[0]:,} tokens in steered requests,"
        f" {means[1]:,} in {OTHERS}; so they may differ in what can be cached"
    )
    return [told]


def _failures(steered: Side, others: Side) -> list[str]:
    failed = [one.unanswered + one.server_errors for one in (steered, others)]
    shares = failed[0] / steered.requests, failed[1] / others.requests
    pooled = sum(failed) / (steered.requests + others.requests)
    chance = sqrt(pooled * (1 - pooled) * (1 / steered.requests + 1 / others.requests))
    if abs(shares[0] - shares[1]) <= _DEVIATIONS * chance:
        return []
    told = (
        f"the sides differ in failures: {percent(shares[0])} of steered requests had no response or"
        f" status 5xx, {percent(shares[1])} of {OTHERS}; failed ones are in no share and no time"
    )
    return [told]


def _sources(steered: Side, others: Side) -> list[str]:
    if not steered.known or not others.known:
        return []
    shares = steered.reported / steered.known, others.reported / others.known
    if abs(shares[0] - shares[1]) <= SHARES_DIFFER:
        return []
    told = (
        "the sides differ in how cached tokens are known: engines reported them of"
        f" {percent(shares[0])} of steered requests and of {percent(shares[1])} of {OTHERS};"
        " the rest is predicted"
    )
    return [told]
