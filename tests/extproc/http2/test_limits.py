from extproc.http2.limits import Budget, Limits


def test_announced_frames_fit_the_windows() -> None:
    limits = Limits()
    assert limits.stream_window_bytes <= limits.connection_window_bytes


def test_budget_takes_as_much_as_it_has_room_for() -> None:
    budget = Budget(10)
    assert budget.take(6)
    assert not budget.take(5)
    budget.give_back(1)
    assert budget.take(5)
    assert budget.used_bytes == 10
