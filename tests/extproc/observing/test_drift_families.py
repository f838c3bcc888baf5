from prometheus_client import generate_latest

from extproc.config.reader import parse
from extproc.fleet.workers import Workers
from extproc.observing.metrics import Metrics
from extproc.observing.outcomes import Circumstances, Outcome
from extproc.observing.usage import Usage
from kvstate.fleet import FollowedWorkers

CONFIG = """
models: [{name: tiny}]
workers: [{endpoint: "127.0.0.1:1", block_size: 32}]
"""
WORKER = "127.0.0.1:1"


def outcome(predicted: int, cached: int) -> Outcome:
    return Outcome(
        model="tiny",
        worker=WORKER,
        is_moved=False,
        status=200,
        ttft_seconds=0.1,
        prompt_tokens=100,
        predicted_tokens=predicted,
        reported=Usage(100, cached, "prompt"),
        is_comparable=True,
    )


def fleet() -> Workers:
    return Workers(parse(CONFIG, "c"), FollowedWorkers(12345678, lambda: 0.0), lambda _: [])


def test_drift_families_show_comparisons_by_worker_and_cause() -> None:
    workers = fleet()
    metrics = Metrics(workers.states)
    for predicted, cached in ((64, 64), (64, 0)):
        metrics.observe_outcome(outcome(predicted, cached))
    text = generate_latest(metrics).decode()
    assert f'kvsteer_predictions_compared_total{{worker="{WORKER}"}} 2.0' in text
    tokens = f'kvsteer_compared_cached_tokens_total{{source="reported",worker="{WORKER}"}} 64.0'
    assert tokens in text
    drift = f'kvsteer_prediction_drifts_total{{cause="feed_not_live",worker="{WORKER}"}} 1.0'
    assert drift in text
    (shown,) = workers.states.statuses()
    assert shown["predictions"]["causes"] == {"feed_not_live": 1}


def test_circumstances_of_a_worker_are_its_feeds_tokens_and_blocks() -> None:
    assert fleet().states.circumstances(outcome(0, 0)) == Circumstances(
        "unsupported", tokens_differ=False, block_size=32, ranks=0
    )


def test_circumstances_of_a_removed_worker_have_defaults() -> None:
    assert fleet().states.circumstances(outcome(0, 0)._replace(worker="gone:1")).block_size == 1
