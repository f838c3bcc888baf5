"""Adapters that a worker's events name by number only."""

from kvstate.following.adapters import AdapterNumbers


def known() -> AdapterNumbers:
    """Two workers with adapters: "red" has another number in each, "blue" is in one of them."""
    adapters = AdapterNumbers()
    adapters.add("v", [(1, "red"), (2, "blue"), (3, "red")])
    adapters.add("w", [(2, "red"), (3, "red")])
    return adapters


def test_an_adapter_has_its_own_numbers_in_each_worker() -> None:
    adapters = known()
    assert adapters.workers_by_number("red") == {1: {"v"}, 2: {"w"}, 3: {"v", "w"}}
    assert (adapters.numbers("v", "red"), adapters.numbers("w", "red")) == ([1, 3], [3, 2])
    assert adapters.numbers("w", "blue") == []
    assert adapters.workers_by_number("green") == {}


def test_nothing_of_a_removed_worker_stays() -> None:
    adapters = known()
    adapters.remove("v")
    assert adapters.workers_by_number("red") == {2: {"w"}, 3: {"w"}}
    assert adapters.workers_by_number("blue") == {}
    assert adapters.workers() == {"w"}
    adapters.remove("w")
    assert adapters.workers() == set()
