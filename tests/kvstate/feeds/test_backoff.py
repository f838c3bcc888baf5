from kvstate.feeds.backoff import Backoff


def test_waits_double_up_to_the_limit_and_start_again() -> None:
    backoff = Backoff(1.0, 5.0, chance=lambda: 0.5)
    assert [backoff.next_seconds() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert backoff.next_seconds() == 1.0


def test_chance_spreads_those_who_failed_together() -> None:
    soonest, latest = Backoff(2.0, 8.0, lambda: 0.0), Backoff(2.0, 8.0, lambda: 1.0)
    assert (soonest.next_seconds(), latest.next_seconds()) == (1.0, 3.0)
