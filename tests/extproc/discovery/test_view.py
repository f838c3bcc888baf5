from extproc.config import Worker
from extproc.discovery.view import Found, doubles, listed, merged

A, B = Worker("10.0.0.1:1"), Worker("10.0.0.2:1")


def test_the_fleet_is_all_views_in_the_order_of_sources() -> None:
    fleet = merged({"workers": listed([A]), "file": listed([B])})
    assert [(name, one.source) for name, one in fleet.items()] == [
        ("10.0.0.1:1", "workers"),
        ("10.0.0.2:1", "file"),
    ]


def test_the_first_source_that_names_a_worker_describes_it() -> None:
    views = {"workers": listed([A]), "file": [Found(A, excluded="not ready"), Found(B)]}
    assert merged(views)["10.0.0.1:1"].found == Found(A)
    assert list(doubles(views)) == [
        ("file", "10.0.0.1:1 is taken from workers, which names it too")
    ]


def test_one_source_may_not_double_itself() -> None:
    assert list(doubles({"file": listed([A, B])})) == []
