from extproc.admin.observed import KEPT_AT_ONCE, KEPT_PER_SECOND, Observed
from kvstate.overlap import Overlap
from tests.extproc.admin.decisions import decided, prompt

HELD = {"a:1": Overlap(16, (1, 0, 0, 0), 0)}


def test_a_request_is_kept_with_its_prompts() -> None:
    observed = Observed()
    observed.decided(decided(), [prompt(range(32))], 5.0)
    assert (observed.recent.last, len(observed.prompts.all())) == (1, 1)


def test_of_a_stream_of_requests_so_many_a_second_are_kept() -> None:
    observed = Observed()
    for _ in range(2 * KEPT_AT_ONCE):
        observed.decided(decided(HELD), [], 5.0)
    assert observed.recent.last == KEPT_AT_ONCE
    for at in (6.0, 5.0):  # the clock may be set back
        for _ in range(KEPT_AT_ONCE):
            observed.decided(decided(HELD), [], at)
    assert observed.recent.last == KEPT_AT_ONCE + KEPT_PER_SECOND
    observed.sample(10.0, {"a:1": (0, 0)})
    assert observed.history.series("a:1")["prompt_tokens"] == [4 * KEPT_AT_ONCE * 32]


def test_each_step_counts_the_tokens_that_went_to_a_worker() -> None:
    observed = Observed()
    observed.decided(decided(HELD), [], 1.0)
    observed.decided(decided(HELD), [], 2.0)
    for at in (5.0, 10.0):
        observed.sample(at, {"a:1": (1, 7)})
    series = observed.history.series("a:1")
    assert (series["prompt_tokens"], series["predicted_tokens"]) == ([64, 0], [32, 0])
    assert (series["in_flight"], series["blocks"]) == ([1, 1], [7, 7])


def test_requests_that_went_nowhere_count_for_no_worker() -> None:
    observed = Observed()
    observed.decided(decided(names=()), [], 1.0)
    observed.sample(5.0, {"a:1": (0, 0)})
    assert observed.history.series("a:1")["prompt_tokens"] == [0]
