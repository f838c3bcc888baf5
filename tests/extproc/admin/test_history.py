from extproc.admin.history import Figures, History

BUSY = Figures(in_flight=2, blocks=10, prompt_tokens=100, predicted_tokens=40)
IDLE = Figures(0, 5, 0, 0)


def test_history_returns_steps_in_order() -> None:
    history = History(steps=3)
    history.sample(1.0, {"a": BUSY})
    history.sample(2.0, {"a": IDLE})
    assert (history.times(), history.series("a")["blocks"]) == ([1.0, 2.0], [10.0, 5.0])


def test_history_keeps_the_last_steps() -> None:
    history = History(steps=2)
    for at in range(5):
        history.sample(at, {"a": Figures(at, 0, 0, 0)})
    assert (history.times(), history.series("a")["in_flight"]) == ([3.0, 4.0], [3.0, 4.0])


def test_history_of_the_fleet_is_the_sum_of_its_workers() -> None:
    history = History()
    history.sample(1.0, {"a": BUSY, "b": BUSY})
    assert {name: values[0] for name, values in history.series("").items()} == {
        "in_flight": 4,
        "blocks": 20,
        "prompt_tokens": 200,
        "predicted_tokens": 80,
        "average_tokens": 0,
        "answered_tokens": 0,
        "reported_tokens": 0,
    }
    assert history.names() == ["a", "b"]


def test_history_is_none_before_a_worker_joins_and_after_it_leaves() -> None:
    history = History()
    history.sample(1.0, {"a": BUSY})
    history.sample(2.0, {"b": IDLE})
    assert (history.series("b")["blocks"], history.series("a")["blocks"]) == (
        [None, 5.0],
        [None, None],
    )


def test_history_of_an_empty_fleet_is_none() -> None:
    history = History()
    history.sample(1.0, {})
    assert (history.names(), history.series("")["blocks"]) == ([], [None])
