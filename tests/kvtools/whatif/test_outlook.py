from xml.etree import ElementTree as ET

import pytest

from kvtools.whatif.engines import ModelledSpeed, Request, Result, result_of
from kvtools.whatif.outlook import (
    IsolationCost,
    MeasuredResults,
    Saving,
    as_json,
    least_workers,
    p90_of,
    svg,
    table,
)

ONE = Result(hit_rate=0.5, p50=0.1, p90=0.3, p99=0.4, throughput=2.0, spread=0.1)
OTHER = ONE._replace(p90=0.5)


def test_table_has_means_over_the_seeds() -> None:
    lines = table({"cost": [ONE, OTHER]}).splitlines()
    assert lines[1].split() == ["cost", "50.0%", "0.100", "0.400", "0.400", "2.00"]
    assert p90_of([ONE, OTHER]) == pytest.approx(0.4)
    assert as_json({"cost": [ONE]})["cost"]["p99"] == 0.4


@pytest.mark.parametrize(
    ("measured", "sentence"),
    [
        (MeasuredResults(3, 0.25, 0.1, 0.2, 0.3), "as recorded 25.0% 0.100 0.200 0.300 -"),
        (MeasuredResults(3, None, None, None, None), "as recorded - - - - -"),
    ],
)
def test_table_ends_with_the_measured_figures(measured: MeasuredResults, sentence: str) -> None:
    assert " ".join(table({"cost": [ONE]}, measured).splitlines()[-1].split()) == sentence


@pytest.mark.parametrize("needed", range(1, 12))
def test_least_workers_are_found_by_few_runs(needed: int) -> None:
    asked: list[int] = []

    def suffices(count: int) -> bool:
        asked.append(count)
        return count >= needed

    assert least_workers(11, suffices) == needed
    assert len(asked) <= 5
    assert least_workers(needed - 1, suffices) is None or needed == 1


@pytest.mark.parametrize(
    ("least", "words"),
    [
        (
            5,
            "3 workers fewer: cost with 5 keeps the TTFT p90 of Envoy least_request with 8",
        ),
        (7, "1 worker fewer: cost with 7 keeps"),
        (8, "No worker fewer: cost needs all 8 for"),
        (None, "No worker fewer: cost with 8 workers misses"),
    ],
)
def test_last_sentence_names_the_workers_saved(least: int | None, words: str) -> None:
    assert words in str(Saving("cost", "Envoy least_request", 8, 1.5, least))


def test_svg_has_a_dot_for_each_policy_and_line() -> None:
    names = [f"policy {number}" for number in range(8)]
    cells = {f"{count} workers": dict.fromkeys(names, 1.0) for count in (8, 4)}
    found = ET.fromstring(svg(cells, names))
    circles = [one for one in found.iter() if one.tag.endswith("circle")]
    texts = [one.text for one in found.iter() if one.tag.endswith("text")]
    assert len(circles) == 8 * 3
    assert {*names, "8 workers", "4 workers"} <= {*texts}


def test_result_of_summarizes_requests() -> None:
    done = Request(0.0, (1, 2), 32, 4, cached=16, first_token_at=0.5, done_at=2.0)
    assert result_of([done], [16, 16]) == Result(0.5, 0.5, 0.5, 0.5, 0.5, 0.0)
    assert ModelledSpeed().slower(2.0).prefill_rate == ModelledSpeed().prefill_rate / 2


@pytest.mark.parametrize(
    ("tenants", "sentence"),
    [
        (0, "No line names a `tenant` or `user`: what isolation costs is not known."),
        (4, "With 4 tenants apart, cost has a hit share of 50.0% instead of 50.0%"),
    ],
)
def test_cost_of_isolation_is_a_sentence(tenants: int, sentence: str) -> None:
    isolating = IsolationCost("cost", tenants, ONE, OTHER)
    assert str(isolating).startswith(sentence)
    assert isolating.as_json()["sentence"] == str(isolating)
    assert isolating.as_json()["apart"] == OTHER._asdict()
