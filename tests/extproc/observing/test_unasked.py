from extproc.observing.unasked import BATCHES, SECONDS, SETTLING_SECONDS, UnaskedRouter


class Fleet:
    """Workers that compute prompts, and a router that is looked at every two seconds."""

    def __init__(self) -> None:
        self.now, self.decided, self.connected, self.batches = 0.0, 0, 0, 0
        self.seen = UnaskedRouter(
            lambda: self.decided, lambda: self.connected, lambda: self.batches, lambda: self.now
        )

    def passing(self, seconds: float, batches: int = 0) -> str:
        said = ""
        for _ in range(int(seconds / 2)):
            self.now += 2
            said = "".join(one.code for one in self.seen.faults())
        self.batches += batches
        return said

    def after_settling(self) -> "Fleet":
        self.passing(SETTLING_SECONDS, BATCHES)
        return self


def test_nobody_asks_though_workers_compute() -> None:
    fleet = Fleet().after_settling()
    assert fleet.passing(SECONDS - SETTLING_SECONDS) == "not-asked"
    fleet.decided += 1
    assert fleet.passing(2) == ""


def test_replays_of_a_start_and_idle_workers_are_no_evidence() -> None:
    fleet = Fleet()
    fleet.batches = 1_000
    fleet.passing(SETTLING_SECONDS, BATCHES - 1)
    assert fleet.passing(10 * SECONDS) == ""


def test_connected_proxy_may_have_nothing_to_ask() -> None:
    fleet = Fleet()
    fleet.connected = 1
    assert fleet.after_settling().passing(10 * SECONDS) == ""


def test_probes_that_connect_now_and_then_are_no_proxy() -> None:
    fleet = Fleet().after_settling()
    fleet.connected = 1
    fleet.passing(2)
    fleet.connected = 0
    assert fleet.passing(SECONDS) == "not-asked"


def test_it_takes_some_time_to_tell() -> None:
    assert Fleet().after_settling().passing(SECONDS - SETTLING_SECONDS - 2) == ""
