from extproc.observing.unknown_models import LEAST, MINUTE_SECONDS, UnknownModels


class Traffic:
    """Requests, some of which name no known model, looked at every five seconds."""

    def __init__(self) -> None:
        self.calls = self.unknown = 0
        self.now = 100.0
        self.seen = UnknownModels(lambda: self.calls, lambda: self.unknown, lambda: self.now)
        assert not [*self.seen.faults()]

    def passing(self, calls: int, unknown: int, seconds: float = 5.0) -> str:
        self.calls += calls
        self.unknown += unknown
        self.now += seconds
        return "".join(str(one) for one in self.seen.faults())


def test_more_than_a_fifth_of_a_minute_is_a_fault() -> None:
    said = Traffic().passing(LEAST, LEAST // 5 + 1)
    assert said.startswith("5 of the last 20 requests name a model that is not configured")


def test_looks_at_short_intervals_add_up() -> None:
    traffic = Traffic()
    said = [traffic.passing(1, 1, 0.5) for _ in range(LEAST)]
    assert not any(said[:-1])
    assert said[-1]


def test_a_fifth_or_few_requests_are_none() -> None:
    assert not Traffic().passing(LEAST, LEAST // 5)
    assert not Traffic().passing(LEAST - 1, LEAST - 1)


def test_fault_ends_a_minute_after_the_requests() -> None:
    traffic = Traffic()
    assert traffic.passing(LEAST, LEAST)
    assert traffic.passing(0, 0)
    for _ in range(int(MINUTE_SECONDS / 5) + 1):
        said = traffic.passing(0, 0)
    assert not said


def test_requests_before_a_long_pause_are_forgotten() -> None:
    traffic = Traffic()
    assert traffic.passing(LEAST, LEAST)
    assert not traffic.passing(0, 0, 10 * MINUTE_SECONDS)
