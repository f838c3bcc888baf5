from extproc.readiness import Readiness


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_ready_is_who_has_caught_up_or_had_the_time_to() -> None:
    caught_up, clock = [False], Clock()
    ready = Readiness(lambda: caught_up[0], 10.0, clock)
    assert not ready()
    caught_up[0] = True
    assert ready()
    caught_up[0] = False
    clock.now = 109.9
    assert not ready()
    clock.now = 110.0
    assert ready()


def test_who_stops_is_not_ready() -> None:
    ready = Readiness(lambda: True, 0.0, Clock())
    ready.is_stopping = True
    assert not ready()
