from extproc.running.readiness import STARTING, STOPPING, Readiness


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_readiness_needs_no_hindrance_or_the_end_of_the_grace() -> None:
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


def test_readiness_is_false_while_stopping() -> None:
    ready = Readiness(lambda: "replays", 0.0, Clock())
    ready.is_listening = True
    assert ready()
    ready.is_stopping = True
    assert (ready(), ready.hindrance()) == (False, STOPPING)


def test_readiness_is_false_before_listening_for_any_time() -> None:
    ready = Readiness(lambda: "", 0.0, Clock())
    assert (ready(), ready.hindrance()) == (False, STARTING)
