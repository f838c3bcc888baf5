"""The figures of handed ids."""

from extproc.features.handing.handing_figures import HandingFigures
from extproc.proof.samples import AGREED, DISAGREED, HANDED, SAMPLE, Samples


def shown(figures: HandingFigures) -> dict[str, float]:
    return {
        f"{one.name} {' '.join(one.labels.values())}": one.value
        for family in figures.collect()
        for one in family.samples
    }


def test_figures_count_requests_tokens_and_samples() -> None:
    samples = Samples()
    samples.note_result(AGREED, ("chats",), 4, 0)
    samples.note_result(DISAGREED, ("chats",), 4, 0, "other tokens")
    figures = HandingFigures(lambda: [("w", samples)])
    figures.count("m", HANDED, 5000)
    figures.count("m", SAMPLE, 0)
    assert shown(figures) == {
        "kvsteer_token_handovers_total m handed": 1,
        "kvsteer_token_handovers_total m sample": 1,
        "kvsteer_handed_tokens_total m": 5000,
        "kvsteer_handover_samples_total w agreed": 1,
        "kvsteer_handover_samples_total w disagreed": 1,
        "kvsteer_handover_refuted w": 1,
    }
