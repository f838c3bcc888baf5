"""The content of a report: the figures of its windows for GET /report, and a sentence on each.

Sentences claim no more than their intervals allow. They say what is missing for an interval, and
how long it takes until it is narrow.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import log, sqrt
from typing import Any, NamedTuple

from extproc.observing.class_report import class_figures
from extproc.observing.comparison import (
    LEAST_REQUESTS,
    QUANTILES,
    Sides,
    cached_share,
    first_byte,
    first_byte_gained,
    length_ratio,
    load_spread,
    more_saved,
    saved_seconds,
    share_gained,
)
from extproc.observing.interval import BLOCKS, Estimate
from extproc.observing.report import (
    CACHE_UNAWARE,
    OTHERS,
    RESOLUTION,
    STEERED,
    Period,
    Report,
    Side,
)

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

# The interval of the shares' difference is small enough if it reaches this far to both sides.
NARROW = 0.02

# The shares of failures differ if their difference exceeds this many standard deviations, as by
# chance alone only one in several hundred does.
_DEVIATIONS = 3.0

# Why prompt tokens that the router does not know are missing, although answers are read.
UNREPORTED = (
    "where the router does not know them, the engine has to report them (vLLM with"
    " --enable-prompt-tokens-details, SGLang with --enable-cache-report)"
)

# The sides by their indices: of the requests, and in a sentence that begins with the first.
SIDES = ("steered", "others", "cache_unaware")
_REQUESTS = ("steered requests", "requests not steered", "requests of a cache-unaware policy")
_NAMES = ("steered requests", "the others", "those of a cache-unaware policy")

_MONTH = 31 * 86_400


class ReportQuery(NamedTuple):
    """What a report should contain: windows by name, in seconds.

    notes: what readers must know about how the report was made. missing: what to turn on, in words,
    where nothing can be counted without it; it is the headline as long as nothing was. classes: the
    configured ones, in their order.
    """

    windows: dict[str, int]
    notes: tuple[str, ...] = ()
    missing: str = ""
    classes: Sequence[str] = ()


def report_as_json(report: Report, asked: ReportQuery, now: float) -> dict[str, Any]:
    """Returns the answer of GET /report as JSON; now: in seconds since 1970."""
    windows = [
        _window(name, Sides.of(report.window(seconds, now)), asked.classes)
        for name, seconds in asked.windows.items()
    ]
    for shorter, longer in pairwise(windows):
        if _requests(longer) == _requests(shorter):
            longer["same_as"] = shorter["same_as"] or shorter["name"]
    return {
        "at": round(now, 3),
        "headline": _headline(windows, asked.missing),
        "notes": list(asked.notes),
        "resolution_percent": round(100 * (RESOLUTION - 1), 1),
        "windows": windows,
    }


def _headline(windows: list[dict[str, Any]], missing: str) -> str:
    """Returns the report's first line: its surest result, or what is missing for one."""
    known = sum(int(one[side]["requests_with_known_tokens"]) for one in windows for side in SIDES)
    return missing if missing and not known else _best(windows)


def _best(windows: list[dict[str, Any]]) -> str:
    """Returns the name and sentence of the window with the surest difference.

    windows: the shortest first; one with the same requests as a shorter one adds nothing.
    """
    sure = [one for one in windows if one["is_enough"] and one["same_as"] is None]
    found = min(sure, key=_width, default=None)
    if found is None:
        found = next((one for one in windows if one["steered"]["requests"]), windows[-1])
    return f"{found['name'][:1].upper()}{found['name'][1:]}: {found['headline']}"


def _requests(window: dict[str, Any]) -> int:
    shed = sum([one["shed"] for one in window["classes"]])
    return int(sum([window[side]["requests"] for side in SIDES]) + shed)


def _width(window: dict[str, Any]) -> float:
    gain = window["difference"]["cached_share"]
    return float(gain["high"] - gain["low"])


def _window(name: str, sides: Sides, classes: Sequence[str]) -> dict[str, Any]:
    window, gain = sides.window, share_gained(sides)
    shares = [cached_share(sides, which) for which in range(len(SIDES))]
    saved = more_saved(sides)
    times = {name: first_byte_gained(sides, quantile) for name, quantile in QUANTILES.items()}
    return {
        "name": name,
        "step_seconds": window.step_seconds,
        "begins_at": window.begins_at,
        "seen_seconds": round(sum(one.seen_seconds for one in window.periods), 3),
        "is_enough": gain is not None and gain.low is not None,
        "same_as": None,
        "headline": headline(sides, shares, gain),
        "warnings": warnings(sides),
        **{name: _figures(sides, at, shares[at]) for at, name in enumerate(SIDES)},
        "compared_with": SIDES[sides.base],
        "difference": {
            "cached_share": gain and gain.as_json(),
            "first_byte_seconds": _estimates_as_json(times),
            "saved_prefill_seconds_per_request": saved and saved.as_json(),
            "seconds_until_narrow": gain and seconds_until_narrow(sides, gain),
        },
        "periods": [_period(one) for one in window.periods],
        "classes": list(class_figures(window.periods, classes)),
    }


def _estimates_as_json(times: dict[str, Estimate | None]) -> dict[str, Any]:
    return {name: one and one.as_json() for name, one in times.items()}


def _figures(sides: Sides, which: int, share: Estimate | None) -> dict[str, Any]:
    side, saved = sides.total[which], saved_seconds(sides, which)
    times = {name: first_byte(sides, which, quantile) for name, quantile in QUANTILES.items()}
    spread = load_spread(side, {worker for one in sides.total for worker in one.workers})
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
        "handed_tokens": side.handed_tokens,
        "mean_prompt_tokens": round(side.prompt_tokens / side.known, 1) if side.known else None,
        "cached_share": share and share.as_json(),
        "first_byte_seconds": _estimates_as_json(times),
        "saved_prefill_seconds": round(side.saved_seconds, 3),
        "saved_prefill_seconds_per_request": saved and saved.as_json(),
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


def _period(period: Period) -> list[int]:
    """Returns requests, prompt tokens and cached tokens of each side in one period."""
    return [
        number
        for side in period.sides()
        for number in (side.requests, side.prompt_tokens, side.cached_tokens)
    ]


def percent(share: float) -> str:
    """Returns a share for people to read: 71 %, 7.1 %, 0.3 %."""
    points = 100 * share
    return f"{points:.0f} %" if abs(points) >= 10 or not round(points, 1) else f"{points:.1f} %"


def duration(seconds: float) -> str:
    """Returns a time for people to read: 90 seconds, 5 minutes, 2.5 hours."""
    for name, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f}".removesuffix(".0") + f" {name}"
    return f"{seconds:.0f} seconds"


def headline(sides: Sides, shares: list[Estimate | None], gain: Estimate | None) -> str:
    """Returns the result in a sentence or two: the difference, and how sure it is."""
    if not sides.total.requests:
        return "No request was counted in this time."
    steered, base = sides.compared
    for which, other in ((STEERED, base), (sides.base, steered)):
        if not other.requests:
            return _alone(sides, shares, which)
    if gain is None:
        return f"Nothing to compare yet: {_missing(sides, (STEERED, sides.base))}."
    return _compared(sides, shares, gain)


def _compared(sides: Sides, shares: list[Estimate | None], gain: Estimate) -> str:
    sentence = f"{_found(shares, STEERED)} of their prompt tokens cached"
    sentence += f", {_NAMES[sides.base]} {_percent_of(shares[sides.base])}"
    if gain.low is None or gain.high is None:
        missing = _missing(sides, (STEERED, sides.base))
        return f"{sentence} ({_points(gain)}; no interval yet: {missing}).{_besides(sides, shares)}"
    low, high = 100 * gain.low, 100 * gain.high
    sentence += f" ({_points(gain)}, 95 % interval {low:.0f} to {high:.0f})."
    if gain.low <= 0 <= gain.high:
        sentence = f"No difference seen: {sentence[0].lower()}{sentence[1:]}"
    return f"{sentence}{_until_narrow(sides, gain)}{_besides(sides, shares)}"


def _found(shares: list[Estimate | None], which: int) -> str:
    name = _REQUESTS[which]
    return f"{name[0].upper()}{name[1:]} found {_percent_of(shares[which])}"


def _percent_of(share: Estimate | None) -> str:
    return percent(0.0 if share is None else share.value)


def _besides(sides: Sides, shares: list[Estimate | None]) -> str:
    """Returns a sentence on cache-unaware requests where others are compared; "" without any."""
    if sides.base == CACHE_UNAWARE or shares[CACHE_UNAWARE] is None:
        return ""
    return f" {_found(shares, CACHE_UNAWARE)}."


def _points(gain: Estimate) -> str:
    return f"difference {100 * gain.value:.0f} points"


def seconds_until_narrow(sides: Sides, gain: Estimate) -> float | None:
    """Returns for how much longer such traffic must go on until the interval is narrow.

    Half the interval shrinks as the root of the time grows. None without an interval.
    """
    if gain.low is None:
        return None
    seen = sum(one.seen_seconds for one in sides.window.periods if _has_known(one))
    return round(max(0.0, seen * (((gain.value - gain.low) / NARROW) ** 2 - 1)), 1)


def _has_known(period: Period) -> bool:
    return any(side.known for side in period.sides())


def _until_narrow(sides: Sides, gain: Estimate) -> str:
    seconds = seconds_until_narrow(sides, gain)
    if not seconds:
        return ""
    time = f"about {duration(seconds)} more" if seconds < _MONTH else "more than a month"
    return f" It takes {time} of such traffic to tell it to {100 * NARROW:.0f} points."


def _missing(sides: Sides, which: Sequence[int]) -> str:
    """Returns what is missing for an interval, and about how long it takes."""
    few = [at for at in which if sides.total[at].known < LEAST_REQUESTS]
    if few:
        counts = [f"{sides.total[at].known} of {LEAST_REQUESTS} {_REQUESTS[at]}" for at in few]
        return f"{' and '.join(counts)} with known prompt tokens so far"
    blocks = sides.together if len(which) > 1 else sides.alone[which[0]]
    if not blocks.missing:
        return "most came at one time"
    step = sides.window.step_seconds
    more = duration(blocks.missing * step)
    return f"it takes {duration(BLOCKS * step)} with requests, so {more} more"


def _alone(sides: Sides, shares: list[Estimate | None], which: int) -> str:
    """Returns the sentence if there are no requests to compare those of one side with."""
    side, share = sides.total[which], shares[which]
    beside = {
        STEERED: "All requests were steered, so there is nothing to compare with.",
        OTHERS: f"No request was steered.{_besides(sides, shares)}",
        CACHE_UNAWARE: "A cache-unaware policy placed all, so there is nothing to compare with.",
    }[which]
    if share is None:
        ended = f"{side.requests} requests ended, but no prompt tokens are known"
        return f"{ended}: {UNREPORTED}. {beside}"
    interval = f"no interval yet: {_missing(sides, [which])}"
    if share.low is not None and share.high is not None:
        interval = f"95 % interval {100 * share.low:.0f} to {100 * share.high:.0f}"
    who = "Steered requests" if which == STEERED else "Requests"
    found = f"found {percent(share.value)} of their prompt tokens cached ({interval})"
    return f"{who} {found}. {beside}"


def warnings(sides: Sides) -> list[str]:
    """Returns other differences of the compared sides, which make a comparison doubtful."""
    steered, base = sides.compared
    if not steered.requests or not base.requests:
        return []
    name = _NAMES[sides.base]
    return [*_lengths(sides, name), *_failures(steered, base, name), *_sources(steered, base, name)]


def _lengths(sides: Sides, name: str) -> list[str]:
    ratio = length_ratio(sides)
    if ratio is None or abs(ratio.value) < log(LENGTHS_DIFFER):
        return []
    if ratio.low is not None and ratio.high is not None and ratio.low <= 0 <= ratio.high:
        return []
    means = [round(side.prompt_tokens / side.known) for side in sides.compared]
    sentence = (
        f"the sides differ in prompt length: on average {means[0]:,} tokens in steered requests,"
        f" {means[1]:,} in {name}; so they may differ in what can be cached"
    )
    return [sentence]


def _failures(steered: Side, others: Side, name: str) -> list[str]:
    failed = [one.unanswered + one.server_errors for one in (steered, others)]
    shares = failed[0] / steered.requests, failed[1] / others.requests
    pooled = sum(failed) / (steered.requests + others.requests)
    chance = sqrt(pooled * (1 - pooled) * (1 / steered.requests + 1 / others.requests))
    if abs(shares[0] - shares[1]) <= _DEVIATIONS * chance:
        return []
    sentence = (
        f"the sides differ in failures: {percent(shares[0])} of steered requests had no response or"
        f" status 5xx, {percent(shares[1])} of {name}; failed ones are in no share and no time"
    )
    return [sentence]


def _sources(steered: Side, others: Side, name: str) -> list[str]:
    if not steered.known or not others.known:
        return []
    shares = steered.reported / steered.known, others.reported / others.known
    if abs(shares[0] - shares[1]) <= SHARES_DIFFER:
        return []
    sentence = (
        "the sides differ in how cached tokens are known: engines reported them of"
        f" {percent(shares[0])} of steered requests and of {percent(shares[1])} of {name};"
        " the rest is predicted"
    )
    return [sentence]
