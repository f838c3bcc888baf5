from xml.etree import ElementTree as ET

import pytest

from kvtools.whatif.engines import ModelledSpeed, Request, Result, result_of
from kvtools.whatif.outlook import (
    IsolationCost,
    MeasuredResults,
    Saving,
    as_json,
    doubt_of,
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


MEASURED = MeasuredResults(300, 300, 0.25, 0.1, 0.3, 0.3)


def test_table_ends_with_what_was_measured_by_who_placed_it_under_names_of_its_own() -> None:
    nothing = MeasuredResults(3, 0, None, None, None, None)
    lines = table({"cost": [ONE]}, {"cost": MEASURED, "proxy": nothing, "": nothing}).splitlines()
    heads = [line.split()[:2] for line in (lines[0], lines[3])]
    assert heads == [["simulated", "hit"], ["as", "recorded"]]
    assert "cached share" in lines[3]
    assert lines[4].split() == ["cost", "25.0%", "0.100", "0.300", "0.300", "300"]
    assert lines[5].split() == ["Envoy's", "own", "choice", "-", "-", "-", "-", "3"]
    assert lines[6].startswith("placed as not known")


ENVOY = ("Envoy least_request", "Envoy round_robin")
FAR = MEASURED._replace(p90=0.5)


@pytest.mark.parametrize(
    ("measured", "doubt"),
    [
        ({}, "no 100 recorded requests"),
        ({"cost": MEASURED._replace(timed=99)}, "no 100 recorded requests"),
        ({"": MEASURED}, "no 100 recorded requests"),
        ({"random": MEASURED}, "no 100 recorded requests"),
        ({"cost": MEASURED}, ""),
        ({"cost": MEASURED._replace(p50=0.15, p90=0.2)}, ""),
        ({"cost": MEASURED._replace(p50=0.16)}, "the recorded times of cost differ"),
        ({"cost": FAR}, "the recorded times of cost differ"),
        ({"cost": MEASURED, "proxy": FAR}, ""),
        ({"cost": FAR, "proxy": FAR}, "the recorded times of cost differ"),
        ({"proxy": MEASURED._replace(p50=9.0)}, "the recorded times of Envoy's own choice differ"),
    ],
)
def test_simulated_times_are_doubted_unless_recorded_ones_are_near(
    measured: dict[str, MeasuredResults], doubt: str
) -> None:
    played = {"cost": [ONE], ENVOY[0]: [ONE], ENVOY[1]: [OTHER]}
    found = doubt_of(played, measured, ENVOY)
    assert found.startswith(doubt)
    assert bool(found) == bool(doubt)


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
            "alone: cost with 5 keeps that of Envoy least_request with 8 (1.5 s)",
        ),
        (7, "1 worker fewer, by the p90 of the time to the first token alone: cost with 7 keeps"),
        (8, "No worker fewer, by the p90 of the time to the first token alone: cost needs all 8"),
        (None, "the first token alone: cost with 8 workers misses"),
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
