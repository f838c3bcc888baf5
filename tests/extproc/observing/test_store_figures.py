from extproc.observing.store_figures import StoreCollector


def test_stores_are_shown_with_their_blocks() -> None:
    (family,) = StoreCollector(lambda: [("s", 7), ("t", 0)]).collect()
    shown = {one.labels["store"]: one.value for one in family.samples}
    assert (family.name, shown) == ("kvsteer_store_blocks", {"s": 7, "t": 0})
