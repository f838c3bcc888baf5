from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from extproc.observing.report import Report
from extproc.observing.side_tokens import SideCollector
from tests.extproc.observing.simulated import BEGIN, over

sides = st.sampled_from(
    [("steered", True, True), ("cache_unaware", True, False), ("unsteered", False, True)]
)
requests = st.lists(
    st.tuples(st.floats(0.0, 4_000.0), st.integers(1, 500), st.integers(0, 500), sides)
)


def shown(report: Report) -> dict[str, float]:
    return {
        f"{sample.name.removeprefix('kvsteer_side_')} {sample.labels['side']}": sample.value
        for family in SideCollector(report).collect()
        for sample in family.samples
    }


@given(requests)
def test_tokens_of_each_side_add_up_over_all_periods(given: list[Any]) -> None:
    report, sums = Report(BEGIN), dict.fromkeys(shown(Report(BEGIN)), 0)
    for after, tokens, cached, (side, is_steered, is_aware) in sorted(given):
        held = min(cached, tokens)
        one = over(held, tokens, is_steered=is_steered, is_cache_aware=is_aware)
        report.feed(one, 0.0, BEGIN + after)
        sums[f"prompt_tokens_total {side}"] += tokens
        sums[f"cached_tokens_total {side}"] += held
        assert shown(report) == sums
