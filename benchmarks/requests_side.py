"""Rows of requests: lookup (token buffer to overlaps) and pick (token buffer to worker)."""

from collections.abc import Mapping, Sequence

from cores import CORES, CompiledCore, PlainCore, made
from measure import (
    Cost,
    Figure,
    Goal,
    Result,
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
PICK_GOALS = {CompiledCore.name: Goal(1 / 15, "<= 1/15"), PlainCore.name: Goal(1, "<= 1")}


def lookup(scale: Scale) -> list[Row]:
    """Returns the rows of lookups, timed from a token buffer to the overlap of every worker."""
    return [row for workers in scale.fleets for row in _lookup(scale, workers)]


def _lookup(scale: Scale, workers: int) -> list[Row]:
    load = build(workers)
    cores, missing = _filled_cores(load)
    radix = or_reason(lambda: _filled_radix(load))
    rows = []
    for size, prompts in load.prompts.items():
        contestants = {name: _look_ups(core, prompts, scale.passes) for name, core in cores.items()}
        if isinstance(radix, Radix):
            _compare_overlaps(cores, radix, prompts)
            contestants["reference"] = _radix_look_ups(radix, prompts, scale.passes)
        figures = _figures(scale, contestants) | missing
        for name in CORES:
            what = f"lookup, {workers} workers, {size} tokens, {name} (us)"
            goal = LOOKUP_GOAL if name == CompiledCore.name and workers == WORKERS else None
            reference = figures["reference"] if isinstance(radix, Radix) else radix
            rows.append(Row(what, figures[name], reference, goal))
    return rows


def pick(scale: Scale) -> list[Row]:
    """Returns the rows of picks, timed from a token buffer to the picked worker."""
    load = build(WORKERS)
    cores, missing = _filled_cores(load)
    publisher = Publisher(HELD)
    selection = or_reason(lambda: filled(publisher))
    rows = []
    for size, prompts in load.prompts.items():
        contestants = {name: _picks(core, prompts, scale.passes) for name, core in cores.items()}
        if isinstance(selection, Selection):
            contestants["reference"] = _selections(cores, selection, prompts, scale.passes)
        figures = _figures(scale, contestants) | missing
        for name in CORES:
            reference = figures["reference"] if isinstance(selection, Selection) else selection
            what = f"pick, {size} tokens, {name} (us)"
            rows.append(Row(what, figures[name], reference, PICK_GOALS[name]))
    if isinstance(selection, Selection):
        selection.close()
    publisher.close()
    return rows


def _figures(scale: Scale, contestants: Mapping[str, Round]) -> dict[str, Result]:
    """Returns microseconds per prompt."""
    each = MICROSECONDS / (PROMPTS * scale.passes)
    costs = interleave(scale.rounds, contestants)
    return {name: Figure([cost.lesser * each for cost in costs[name]]) for name in costs}


def _filled_cores(load: Workload) -> tuple[dict[str, PlainCore], dict[str, str]]:
    cores, missing = made(len(load.held))
    for worker, pieces in enumerate(load.held):
        for payload in messages(pieces):
            for core in cores.values():
                core.apply(worker, payload)
    return cores, missing


def _filled_radix(load: Workload) -> Radix:
    radix = Radix()
    for worker, pieces in enumerate(load.held):
        for piece in pieces:
            radix.store(worker, piece)
    return radix


def _look_ups(core: PlainCore, prompts: Sequence[Tokens], passes: int) -> Round:
    def one_round() -> Cost:
        with timed() as cost:
            for _ in range(passes):
                core.look_up(prompts)
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


def _picks(core: PlainCore, prompts: Sequence[Tokens], passes: int) -> Round:
    def one_round() -> Cost:
        with timed() as cost:
            for _ in range(passes):
                for tokens in prompts:
                    core.pick(tokens)
        return cost

    return one_round


def _selections(
    cores: Mapping[str, PlainCore],
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
            for name, core in cores.items():
                _require(core.picked_blocks(tokens) == theirs, name, "pick")
    tried = {form: selection.select(lists, form).lesser for form in selection.forms}
    cheapest = min(tried, key=lambda form: tried[form])
    return lambda: selection.select(lists * passes, cheapest)


def _compare_overlaps(
    cores: Mapping[str, PlainCore], radix: Radix, prompts: Sequence[Tokens]
) -> None:
    for tokens in prompts:
        theirs = radix.overlaps(tokens.tolist())
        for name, core in cores.items():
            _require(core.overlaps(tokens) == theirs, name, "lookup")


def _require(equal: bool, name: str, what: str) -> None:
    if not equal:
        raise SystemExit(f"{what}: the {name} and the reference do not find the same overlap")
