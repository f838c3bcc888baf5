from typing import Any

import pytest
from msgspec.structs import replace

from extproc.admin.observations import (
    KEPT_AT_ONCE,
    KEPT_PER_SECOND,
    Observations,
    mean_held_tokens,
)
from extproc.observing.outcomes import Outcome
from extproc.observing.usage import Usage
from extproc.requests.request import PLAIN_REQUEST
from extproc.routing.decision import Decision
from extproc.routing.inputs.query import Query
from kvstate.overlap import Overlap, Prompt
from tests.extproc.admin.decisions import decided, prompt


class Clock:
    """Stands still until it is set."""

    at = 5.0

    def __call__(self) -> float:
        return self.at


def begin(observations: Observations, decision: Decision, *prompts: Prompt) -> None:
    """Has a request begin that was decided so."""
    observations.begin(PLAIN_REQUEST, Query("m", prompts), decision, 0.0)


HELD = {"a:1": Overlap(16, (1, 0, 0, 0), 0)}


def test_decided_keeps_a_request_with_its_prompts() -> None:
    observations = Observations(Clock())
    begin(observations, decided(), prompt(range(32)))
    assert (observations.recent.last, len(observations.prompts.all())) == (1, 1)


def test_decided_keeps_a_bounded_number_of_requests_a_second() -> None:
    clock = Clock()
    observations = Observations(clock)
    for _ in range(2 * KEPT_AT_ONCE):
        begin(observations, decided(HELD))
    assert observations.recent.last == KEPT_AT_ONCE
    for clock.at in (6.0, 5.0):  # the clock may be set back
        for _ in range(KEPT_AT_ONCE):
            begin(observations, decided(HELD))
    assert observations.recent.last == KEPT_AT_ONCE + KEPT_PER_SECOND
    observations.sample(10.0, {"a:1": (0, 0)})
    assert observations.history.series("a:1")["prompt_tokens"] == [4 * KEPT_AT_ONCE * 32]


def test_sample_counts_the_tokens_steered_to_each_worker_by_what_it_holds() -> None:
    observations = Observations(Clock())
    one = decided(HELD)
    begin(observations, one)
    begin(observations, one)
    begin(observations, replace(one, is_steered=False))
    begin(observations, replace(one, basis=replace(one.basis, policy="round_robin")))
    for at in (5.0, 10.0):
        observations.sample(at, {"a:1": (1, 7)})
    series = observations.history.series("a:1")
    assert (series["prompt_tokens"], series["predicted_tokens"]) == ([64, 0], [32, 0])
    assert (series["in_flight"], series["blocks"]) == ([1, 1], [7, 7])


def test_sample_counts_the_tokens_that_round_robin_would_have_held() -> None:
    observations = Observations(Clock(), kept_at_once=1)
    for _ in range(3):  # one of them is kept, and represents them all
        begin(observations, decided(HELD))
    observations.sample(5.0, {"a:1": (0, 0)})
    series = observations.history.series("a:1")
    assert (series["predicted_tokens"], series["average_tokens"]) == ([48], [24])
    begin(observations, decided(HELD))  # not kept, so nothing is known to be saved
    observations.sample(10.0, {"a:1": (0, 0)})
    assert observations.history.series("a:1")["average_tokens"] == [24, 16]


def test_mean_held_tokens_leaves_out_excluded_workers() -> None:
    assert mean_held_tokens(decided(HELD).basis) == 8
    assert mean_held_tokens(replace(decided(HELD).basis, excluded=("", "draining"))) == 16
    assert mean_held_tokens(decided(names=()).basis) == 0


def test_sample_counts_unplaced_requests_for_no_worker() -> None:
    observations = Observations(Clock())
    begin(observations, decided(names=()))
    observations.sample(5.0, {"a:1": (0, 0)})
    assert observations.history.series("a:1")["prompt_tokens"] == [0]


def test_served_answer_is_noted_with_its_request() -> None:
    observations = Observations(Clock())
    decision = decided()
    begin(observations, decision)
    observations.note_server(decision, "9.9.9.9:1")
    (kept,) = observations.recent.newest_after(0)
    assert kept.served == "9.9.9.9:1"


@pytest.mark.parametrize(
    ("known", "usage", "answered", "reported"),
    [
        (32, Usage(64, 24), 32, 24),
        (32, Usage(64, 48), 32, 32),
        (0, Usage(64, 48), 64, 48),
        (0, Usage(None, 48), 0, 0),
        (32, Usage(64, None), 0, 0),
    ],
)
def test_sample_counts_the_tokens_that_engines_reported_as_cached(
    known: int, usage: Usage, answered: int, reported: int
) -> None:
    observations = Observations(Clock())
    outcome = Outcome("m", "a:1", False, 200, 0.1, known, 16, usage, is_comparable=True)
    of_others: list[dict[str, Any]] = [
        {"worker": ""},
        {"is_steered": False},
        {"is_cache_aware": False},
    ]
    for one in (outcome, *(outcome._replace(**changes) for changes in of_others), None):
        observations.note_end(decided(HELD), one, is_booked=True, is_sent=True)
    observations.sample(5.0, {"a:1": (0, 0)})
    series = observations.history.series("a:1")
    assert (series["answered_tokens"], series["reported_tokens"]) == ([answered], [reported])
