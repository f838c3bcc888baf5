from extproc.app import STARTING, STOPPING, Readiness


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_ready_is_who_awaits_nothing_or_had_the_time_to() -> None:
    awaited, clock = ["replays"], Clock()
    ready = Readiness(lambda: awaited[0], 10.0, clock)
    ready.is_listening = True
    assert (ready(), ready.hindrance()) == (False, "replays")
    awaited[0] = ""
    assert (ready(), ready.hindrance()) == (True, "")
    awaited[0] = "replays"
    clock.now = 109.9
    assert not ready()
    clock.now = 110.0
    assert (ready(), ready.hindrance()) == (True, "")


def test_who_stops_is_not_ready_and_says_so() -> None:
    ready = Readiness(lambda: "replays", 0.0, Clock())
    ready.is_listening = True
    assert ready()
    ready.is_stopping = True
    assert (ready(), ready.hindrance()) == (False, STOPPING)


def test_who_does_not_listen_yet_is_not_ready_however_long_that_takes() -> None:
    ready = Readiness(lambda: "", 0.0, Clock())
    assert (ready(), ready.hindrance()) == (False, STARTING)
