from extproc.features.fetching.store_figures import StoreCollector


def test_stores_are_shown_with_their_blocks() -> None:
    family, _ = StoreCollector(lambda: [("s", 7), ("t", 0)]).collect()
    shown = {one.labels["store"]: one.value for one in family.samples}
    assert (family.name, shown) == ("kvsteer_store_blocks", {"s": 7, "t": 0})


def test_events_that_a_store_publishes_are_counted_by_kind() -> None:
    _, family = StoreCollector(list, lambda: [("s", {"stored": 2, "gap": 0})]).collect()
    shown = {tuple(one.labels.values()): one.value for one in family.samples}
    assert (family.name, shown) == ("kvsteer_store_events", {("s", "stored"): 2, ("s", "gap"): 0})
