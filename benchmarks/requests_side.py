"""Rows of requests: lookup (token buffer to overlaps) and pick (token buffer to worker)."""

from collections.abc import Mapping, Sequence

from indexed_workers import CORE, IndexedWorkers
from measure import (
    Cost,
    Figure,
    Goal,
    Round,
    Row,
    Scale,
    interleave,
    or_reason,
    timed,
)
from peer_dynamo import Radix, Selection
from publisher import HELD, Publisher, filled
from workload import PROMPTS, Tokens, Workload, build, messages

MICROSECONDS = 1e6
WORKERS = 8

LOOKUP_GOAL = Goal(1 / 5, "<= 1/5")
PICK_GOAL = Goal(1 / 15, "<= 1/15")


def lookup(scale: Scale) -> list[Row]:
    """Returns the rows of lookups, timed from a token buffer to the overlap of every worker."""
    return [row for workers in scale.fleets for row in _lookup(scale, workers)]


def _lookup(scale: Scale, workers: int) -> list[Row]:
    load = build(workers)
    ours = _filled(load)
    radix = or_reason(lambda: _filled_radix(load))
    rows = []
    for size, prompts in load.prompts.items():
        contestants = {"ours": _look_ups(ours, prompts, scale.passes)}
        if isinstance(radix, Radix):
            _compare_overlaps(ours, radix, prompts)
            contestants["reference"] = _radix_look_ups(radix, prompts, scale.passes)
        figures = _figures(scale, contestants)
        what = f"lookup, {workers} workers, {size} tokens, {CORE} (us)"
        goal = LOOKUP_GOAL if workers == WORKERS else None
        reference = figures["reference"] if isinstance(radix, Radix) else radix
        rows.append(Row(what, figures["ours"], reference, goal))
    return rows


def pick(scale: Scale) -> list[Row]:
    """Returns the rows of picks, timed from a token buffer to the picked worker."""
    load = build(WORKERS)
    ours = _filled(load)
    publisher = Publisher(HELD)
    selection = or_reason(lambda: filled(publisher))
    rows = []
    for size, prompts in load.prompts.items():
        contestants = {"ours": _picks(ours, prompts, scale.passes)}
        if isinstance(selection, Selection):
            contestants["reference"] = _selections(ours, selection, prompts, scale.passes)
        figures = _figures(scale, contestants)
        reference = figures["reference"] if isinstance(selection, Selection) else selection
        what = f"pick, {size} tokens, {CORE} (us)"
        rows.append(Row(what, figures["ours"], reference, PICK_GOAL))
    if isinstance(selection, Selection):
        selection.close()
    publisher.close()
    return rows


def _figures(scale: Scale, contestants: Mapping[str, Round]) -> dict[str, Figure]:
    """Returns microseconds per prompt."""
    each = MICROSECONDS / (PROMPTS * scale.passes)
    costs = interleave(scale.rounds, contestants)
    return {name: Figure([cost.lesser * each for cost in costs[name]]) for name in costs}


def _filled(load: Workload) -> IndexedWorkers:
    ours = IndexedWorkers(len(load.held))
    for worker, pieces in enumerate(load.held):
        for payload in messages(pieces):
            ours.apply(worker, payload)
    return ours


def _filled_radix(load: Workload) -> Radix:
    radix = Radix()
    for worker, pieces in enumerate(load.held):
        for piece in pieces:
            radix.store(worker, piece)
    return radix


def _look_ups(ours: IndexedWorkers, prompts: Sequence[Tokens], passes: int) -> Round:
    def one_round() -> Cost:
        with timed() as cost:
            for _ in range(passes):
                ours.look_up(prompts)
        return cost

    return one_round


def _radix_look_ups(radix: Radix, prompts: Sequence[Tokens], passes: int) -> Round:
    lists = [tokens.tolist() for tokens in prompts]

    def one_round() -> Cost:
        with timed() as cost:
            for _ in range(passes):
                radix.look_up(lists)
        return cost

    return one_round


def _picks(ours: IndexedWorkers, prompts: Sequence[Tokens], passes: int) -> Round:
    def one_round() -> Cost:
        with timed() as cost:
            for _ in range(passes):
                for tokens in prompts:
                    ours.pick(tokens)
        return cost

    return one_round


def _selections(
    ours: IndexedWorkers,
    selection: Selection,
    prompts: Sequence[Tokens],
    passes: int,
) -> Round:
    """Returns a round of picks with the cheapest form of request.

    Before that, it checks that overlaps equal KVSteer's.
    """
    lists = [tokens.tolist() for tokens in prompts]
    for form in selection.forms:
        for tokens, as_list in zip(prompts, lists, strict=True):
            theirs = selection.picked_blocks(as_list, form)
            _require(ours.picked_blocks(tokens) == theirs, "pick")
    tried = {form: selection.select(lists, form).lesser for form in selection.forms}
    cheapest = min(tried, key=lambda form: tried[form])
    return lambda: selection.select(lists * passes, cheapest)


def _compare_overlaps(ours: IndexedWorkers, radix: Radix, prompts: Sequence[Tokens]) -> None:
    for tokens in prompts:
        theirs = radix.overlaps(tokens.tolist())
        _require(ours.overlaps(tokens) == theirs, "lookup")


def _require(equal: bool, what: str) -> None:
    if not equal:
        raise SystemExit(f"{what}: ours and the reference do not find the same overlap")
