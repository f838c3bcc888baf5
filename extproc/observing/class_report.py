"""The part of a report on classes of requests: figures for each, without intervals."""

from collections.abc import Iterator, Sequence
from typing import Any

from extproc.observing.comparison import QUANTILES, quantile
from extproc.observing.report import Classes, ClassSide, Period, add_classes, hash_of, seconds_at


def class_figures(periods: Sequence[Period], names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the figures of each configured class, and of all others together, if there are any.

    names: of the configured classes. Nothing is yielded if no request had a class.
    """
    total: Classes = {}
    for one in periods:
        add_classes(total, one.classes)
    if not total:
        return
    for name in names:
        yield _figures(name, total.pop(hash_of(name), ClassSide()))
    if total:
        others = ClassSide()
        for left in total.values():
            others.add(left)
        yield _figures(None, others)


def _figures(name: str | None, found: ClassSide) -> dict[str, Any]:
    """Returns the figures of a class. name: None of those that are no longer configured."""
    side = found.side
    share = side.cached_tokens / side.prompt_tokens if side.prompt_tokens else None
    return {
        "name": name,
        "requests": side.requests,
        "shed": found.shed,
        "unanswered": side.unanswered,
        "status_5xx": side.server_errors,
        "status_4xx": side.client_errors,
        "prompt_tokens": side.prompt_tokens,
        "cached_tokens": side.cached_tokens,
        "cached_share": None if share is None else round(share, 4),
        "first_byte_seconds": {
            word: _seconds(side.first_bytes, part) for word, part in QUANTILES.items()
        },
    }


def _seconds(first_bytes: dict[int, int], part: float) -> float | None:
    return round(seconds_at(quantile(first_bytes, part)), 4) if first_bytes else None
