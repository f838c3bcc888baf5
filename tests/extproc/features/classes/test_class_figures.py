"""The figures of requests with classes."""

from extproc.features.classes.class_figures import ClassFigures


def samples(figures: ClassFigures) -> dict[str, float]:
    return {
        f"{one.name} {' '.join(one.labels.values())}": one.value
        for family in figures.collect()
        for one in family.samples
    }


def test_figures_count_requests_by_class() -> None:
    figures = ClassFigures()
    for name, verdict, is_booked in (
        ("a", "steer", True),
        ("a", "steer", True),
        ("b", "shed", False),
    ):
        figures.begin(name, verdict, is_booked=is_booked)
    figures.end("a", 0.3, is_booked=True)
    figures.end("b", None, is_booked=False)
    found = samples(figures)
    assert found["kvsteer_class_requests_total a steer"] == 2
    assert found["kvsteer_class_requests_total b shed"] == 1
    assert (found["kvsteer_class_in_flight a"], found["kvsteer_class_in_flight b"]) == (1, 0)
    assert found["kvsteer_class_first_byte_seconds_count a"] == 1
    assert "kvsteer_class_first_byte_seconds_count b" not in found


def test_figures_are_empty_without_classes() -> None:
    assert samples(ClassFigures()) == {}
