"""What goes wrong in a fleet, in the simulated time of the routing benchmark."""

import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))

import routing_legs
from routing_cells import Cell, arrivals
from routing_trace import lines_of
from routing_workloads import (
    herd,
    long_prompts,
    multi_turn,
    shared_prefix,
    single_shot,
    trace,
)

from extproc.config.schema import Policy
from extproc.routing.load.endpoint_load import Ticket
from extproc.routing.load.loads import Loads
from kvtools.whatif import routers
from kvtools.whatif.engines import (
    BLOCK_TOKENS,
    HANDOVER_SECONDS,
    ModelledFleet,
    ModelledSpeed,
    Request,
    Result,
)
from kvtools.whatif.routers import Contestant, run
from kvtools.whatif.traces import MOONCAKE_BLOCK_TOKENS

DEFAULT = Contestant("cost", "cost", expects=True)
LEAST = Contestant("least", "least_request")
SEED = 5


def results(cell: Cell, *contestants: Contestant) -> list[Result]:
    given = arrivals(cell, SEED)
    return [run(cell.stage, one, given, SEED) for one in contestants]


def test_request_waits_for_earlier_prompts_and_its_own() -> None:
    fleet = ModelledFleet([ModelledSpeed(1_000.0, 1_000, 0.0, 0.0)], 1_000, 0.0)
    requests = [Request(0.0, range(n, n + 10), 1_280, 0, ()) for n in (0, 100, 0)]
    fleet.run(requests, lambda *_: 0, lambda *_: None)
    cached = 9 * BLOCK_TOKENS
    assert [one.cached for one in requests] == [0, 0, cached]
    assert [one.first_token_at for one in requests] == pytest.approx(
        [1.28, 2.56, 2.56 + (1_280 - cached) / 1_000]
    )


def test_transferred_prompt_waits_for_no_waiting_prompt() -> None:
    speed = ModelledSpeed(1_000.0, 1_000, 0.000_1, 0.0)
    fleet = ModelledFleet([speed, speed], 1_000, 0.0, transfer_rate=10_000.0)
    requests = [Request(0.0, range(n, n + 10), 1_280, 0, ()) for n in (0, 100, 200, 300)]
    requests[2].prefill = 0
    fleet.run(requests, lambda *_: 1, lambda *_: None)
    # its KV arrives while the second one is computed and the fourth one waits
    assert 1.28 < 1.28 + HANDOVER_SECONDS + 1_280 / 10_000 < 2.56
    found = [one.first_token_at for one in requests]
    assert found == pytest.approx([1.28, 2.56, 2.56, 3.84], rel=0.01)
    assert [engine.computed_tokens for engine in fleet.engines] == [1_280, 3_840]


def test_split_decisions_beat_every_fixed_rule() -> None:
    cell = routing_legs.Cell("long", long_prompts(8, 25))
    ours, *fixed, _ = (
        routing_legs.run(cell, one, SEED).goodput for one in routing_legs.CONTESTANTS
    )
    assert ours > 1.1 * max(fixed)


def test_full_cache_evicts_the_least_recently_used() -> None:
    fleet = ModelledFleet([ModelledSpeed()], 12, 0.0)
    requests = [Request(float(at), range(n, n + 5), 640, 1) for at, n in enumerate((0, 10, 20, 0))]
    fleet.run(requests, lambda *_: 0, lambda *_: None)
    removed = [block for _, _, _, blocks in fleet.published for block in blocks]
    assert set(range(5)) & set(removed)
    assert requests[-1].cached < 4 * BLOCK_TOKENS


def test_lost_worker_delays_few_and_its_prefixes_are_rebuilt_elsewhere() -> None:
    whole = Cell("whole", shared_prefix(8, 40), workers=4)
    lossy = whole._replace(lost_at=15.0)
    (before,) = results(whole, DEFAULT)
    ours, least = results(lossy, DEFAULT, LEAST)
    assert ours.p90 < 0.7 * least.p90
    assert ours.hit_rate > 0.8 * before.hit_rate


def test_straggler_gets_fewer_requests_and_delays_few() -> None:
    cell = Cell("straggler", single_shot(16, 30), slow=4.0)
    ours, least = results(cell, DEFAULT, LEAST)
    assert ours.p90 < least.p90


def test_unknown_straggler_is_found_by_its_metrics() -> None:
    cell = Cell("straggler", single_shot(18, 60), slow=4.0)
    blind = Contestant("blind", "cost", expects=True, prefill_rate=4_000)
    unscraped, scraped = results(cell, blind, blind._replace(scrape_seconds=1.0))
    assert scraped.p90 < unscraped.p90 / 2


@pytest.mark.slow
def test_routers_that_share_and_sample_nearly_equal_a_single_one() -> None:
    four = DEFAULT._replace(routers=4)
    sharing = four._replace(tick_seconds=0.01)
    all_compared = sharing._replace(rules=Policy(sample=0))
    for workload in (single_shot(100, 8), shared_prefix(75, 8, groups=300)):
        cell = Cell("routers", workload, workers=32)
        one, alone, shared, herd = results(cell, DEFAULT, four, sharing, all_compared)
        assert shared.p90 < 1.2 * one.p90
        assert shared.p90 < 0.9 * alone.p90
        assert shared.p99 < herd.p99
        assert shared.hit_rate > one.hit_rate - 0.02


@pytest.mark.slow
def test_routers_that_share_learn_speeds_as_well_as_a_single_one() -> None:
    cell = Cell("1:2:4", single_shot(22, 40), workers=9, rates=(4_000.0, 8_000.0, 16_000.0))
    learns = DEFAULT._replace(learns=True)
    four = DEFAULT._replace(routers=4, tick_seconds=0.01)
    one, shared, unlearned = results(cell, learns, four._replace(learns=True), four)
    assert shared.p90 < 1.3 * one.p90
    assert shared.p90 < 0.5 * unlearned.p90


def test_simulated_routers_never_see_past_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[float] = []

    class Watched(Loads):
        def note_computed(self, ticket: Ticket, now: float) -> None:
            seen.append(now)
            super().note_computed(ticket, now)

    monkeypatch.setattr(routers, "Loads", Watched)
    four = DEFAULT._replace(learns=True, routers=4, tick_seconds=0.01)
    results(Cell("few", single_shot(4, 20), workers=2), four)
    assert seen
    assert seen == sorted(seen)


def test_herd_is_served_as_soon_as_by_least_request() -> None:
    cell = Cell("herd", herd(3, 64))
    ours, least = results(cell, DEFAULT, LEAST)
    assert ours.p90 < 1.05 * least.p90
    assert ours.spread < 0.2


def test_expectations_reduce_recomputed_prefixes() -> None:
    cell = Cell("late", shared_prefix(24, 20), delay_seconds=2.0)
    ours, plain, least = results(cell, DEFAULT, DEFAULT._replace(expects=False), LEAST)
    assert ours.hit_rate > plain.hit_rate > least.hit_rate
    assert ours.p90 < plain.p90 < least.p90


def test_expectations_without_events_beat_least_request() -> None:
    cell = Cell("no events", shared_prefix(12, 30))
    blind = DEFAULT._replace(sees_events=False)
    ours, least = results(cell, blind, LEAST)
    assert ours.hit_rate > 1.5 * least.hit_rate
    assert ours.p90 < least.p90


def test_mooncake_trace_is_played(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1024, "output_length": 9, "hash_ids": [1, 2]}\n'
        '{"timestamp": 5000, "input_length": 1536, "output_length": 9, "hash_ids": [1, 2, 3]}\n'
    )
    cell = Cell("trace", trace(path, speedup=2.0), workers=2)
    requests = arrivals(cell, 0).requests
    assert [(one.at, one.tokens, one.answer_tokens) for one in requests] == [
        (0.0, 1024, 9),
        (2.5, 1536, 9),
    ]
    assert results(cell, DEFAULT)[0].hit_rate == pytest.approx(1024 / (1024 + 1536))


def test_workload_written_as_a_trace_shares_the_same_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    before = arrivals(Cell("chats", multi_turn(2, 20)), SEED).requests
    path.write_text("\n".join(lines_of(before)))
    after = arrivals(Cell("trace", trace(path)), SEED).requests
    assert [(one.tokens, one.answer_tokens) for one in after] == [
        (one.tokens, one.answer_tokens) for one in before
    ]
    per_block = MOONCAKE_BLOCK_TOKENS // BLOCK_TOKENS
    for one, other in itertools.combinations(range(len(before)), 2):
        shared = common(before[one].blocks, before[other].blocks) // per_block
        assert common(after[one].blocks, after[other].blocks) // per_block == shared


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no request in it"),
        ("{", "line 1: "),
        ('{"timestamp": 0, "output_length": 1, "hash_ids": [1]}', "`input_length`"),
        ('{"timestamp": 0, "input_length": "x", "output_length": 1, "hash_ids": []}', "`int "),
    ],
)
def test_line_that_is_no_request_is_named(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=f"trace.jsonl.*{fault}"):
        arrivals(Cell("trace", trace(path)), SEED)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of blocks at the beginning that two prompts share."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in pairs)


def test_arrivals_are_the_same_for_every_contestant() -> None:
    cell = Cell("one", single_shot(5, 10))
    first, second = arrivals(cell, SEED), arrivals(cell, SEED)
    assert [one.at for one in first.requests] == [one.at for one in second.requests]
    assert Counter(len(one.blocks) for one in first.fresh()) == Counter(
        len(one.blocks) for one in second.requests
    )
