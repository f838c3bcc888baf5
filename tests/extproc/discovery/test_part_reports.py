from extproc.discovery.view import PartReports, Report, View


class Heard:
    """What was told on, in order."""

    def __init__(self) -> None:
        self.told: list[str] = []
        parts = PartReports(Report(self.view, lambda: self.told.append("well"), self.told.append))
        self.pods = parts.viewing("pods")
        self.pool = parts.aside("pool")

    def view(self, view: View, note: str, fault: str = "") -> None:
        self.told.append(f"view {len(view)} {note} {fault}".rstrip())


def test_a_fault_of_one_part_lasts_though_the_others_are_well() -> None:
    heard = Heard()
    heard.pool.fault("no pool")
    heard.pods.confirm()
    heard.pods.view((), "odd")
    heard.pool.confirm()
    heard.pods.view((), "")
    assert heard.told == ["no pool", "view 0 odd no pool", "well", "view 0"]


def test_what_fails_in_all_parts_is_told_in_the_same_words() -> None:
    heard = Heard()
    heard.pods.fault("away")
    heard.pool.fault("away")
    heard.pool.confirm()
    heard.pods.confirm()
    assert heard.told == ["away", "away", "away", "well"]


def test_parts_that_fail_in_different_ways_are_both_told() -> None:
    heard = Heard()
    heard.pods.fault("no pods")
    heard.pool.fault("no pool")
    assert heard.told == ["no pods", "no pods; no pool"]


def test_only_the_part_that_gives_views_confirms_them() -> None:
    heard = Heard()
    heard.pool.confirm()
    assert heard.told == []
    heard.pods.confirm()
    assert heard.told == ["well"]
