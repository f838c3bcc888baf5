from extproc.observing.deliveries import NOBODY_FOLLOWED
from tests.extproc.fleet.fleets import workers

FIRST, SECOND = "127.0.0.1:1", "127.0.0.1:2"
TWO = f'{{endpoint: "{FIRST}", model: a}}, {{endpoint: "{SECOND}", model: a}}'


def test_worst_names_the_worker_whose_requests_go_astray() -> None:
    strays = workers(TWO).strays
    for _ in range(100):
        strays.note(FIRST, is_elsewhere=True)
        strays.note(SECOND, is_elsewhere=False)
    assert strays.cause(SECOND) == ""
    assert strays.cause(FIRST)
    assert strays.worst() == f"{FIRST}: {strays.cause(FIRST)}"


def test_worst_names_no_worker_if_nobody_follows_the_pick() -> None:
    strays = workers(TWO).strays
    for name in (FIRST, SECOND) * 100:
        strays.note(name, is_elsewhere=True)
    assert strays.worst() == NOBODY_FOLLOWED


def test_strays_of_a_removed_worker_have_no_cause() -> None:
    strays = workers(TWO).strays
    strays.note("gone:1", is_elsewhere=True)
    assert (strays.cause("gone:1"), strays.worst()) == ("", "")
