import zmq

from extproc.doctor.feed_visit import (
    PUBLISHERS,
    REPLAYERS,
    Greeted,
    Telling,
    is_publisher,
    is_replayer,
    judge_loads,
    judge_places,
    judge_replays,
    judge_swapped,
    judge_told,
)
from extproc.doctor.findings import About
from extproc.doctor.worker_visit import Told
from kvstate.feeds.feed_sources import ZmqSource

ABOUT = About("worker")
PUB = Greeted(mechanism="NULL", socket="PUB")
ROUTER = Greeted(mechanism="NULL", socket="ROUTER")
CLOSED = Greeted(reason="connection refused")
EVENTS, REPLAY, NEXT = "tcp://h:1", "tcp://h:9", "tcp://h:2"
ONE = (ZmqSource(EVENTS, REPLAY, ""),)
TWO = (*ONE, ZmqSource(NEXT, None, ""))


def told_codes(*theirs: ZmqSource, ours: tuple[ZmqSource, ...] = ONE) -> list[str]:
    return [one.code for one in judge_told(ABOUT, ours, Told(theirs, "/kv_event_sources"))]


def place_code(look: Greeted) -> list[str]:
    return [one.code for one in judge_places(ABOUT, ONE, {EVENTS: look}, None)]


def test_what_a_worker_does_not_tell_cannot_be_wrong() -> None:
    assert not list(judge_told(ABOUT, ONE, None))
    assert told_codes(*ONE) == []


def test_a_worker_that_tells_otherwise_is_believed() -> None:
    assert told_codes() == ["events-off"]
    assert told_codes(*TWO) == ["ranks-miscounted"]
    assert told_codes(*ONE, ours=(ZmqSource(EVENTS, REPLAY, "kv"),)) == ["topic-wrong"]
    assert told_codes(*ONE, ours=(ZmqSource(EVENTS, None, ""),)) == ["replay-unused"]


def test_who_answers_at_the_feeds_port_is_judged() -> None:
    assert place_code(PUB) == []
    assert place_code(CLOSED) == ["feed-nobody-listens"]
    assert place_code(Greeted()) == ["feed-not-zmq"]
    assert place_code(Greeted(mechanism="CURVE")) == ["feed-secured"]
    assert place_code(ROUTER) == ["feed-wrong-socket"]


def test_libzmq_names_its_sockets_as_they_are_judged() -> None:
    assert {zmq.SocketType.PUB.name, zmq.SocketType.XPUB.name} == set(PUBLISHERS)
    assert {zmq.SocketType.ROUTER.name} == set(REPLAYERS)


def test_a_rank_that_is_missing_beside_another_is_miscounted() -> None:
    (one,) = judge_places(ABOUT, TWO, {EVENTS: PUB, NEXT: CLOSED}, None)
    assert (one.code, one.says) == ("rank-missing", "rank 1: tcp://h:2: connection refused")


def test_another_port_that_the_worker_names_is_passed_on() -> None:
    elsewhere = Told((ZmqSource("tcp://h:7", None, ""),), "/kv_event_sources")
    (one,) = judge_places(ABOUT, ONE, {EVENTS: CLOSED}, elsewhere)
    assert one.says.endswith("the worker reports that it publishes at tcp://h:7")
    same = Told((ZmqSource("tcp://other:1", None, ""),), "/kv_event_sources")
    (one,) = judge_places(ABOUT, ONE, {EVENTS: CLOSED}, same)
    assert one.says.endswith("refused")


def test_who_answers_at_the_replays_port_is_judged() -> None:
    def codes(look: Greeted) -> list[str]:
        return [one.code for one in judge_replays(ABOUT, TWO, {REPLAY: look})]

    assert codes(ROUTER) == []
    assert codes(CLOSED) == ["replay-nobody-listens"]
    assert codes(Greeted()) == ["replay-not-zmq"]
    assert codes(PUB) == ["replay-wrong-socket"]


def test_who_answers_at_the_port_of_the_load_is_judged() -> None:
    sources = (ZmqSource(EVENTS, None, "", load=NEXT), ZmqSource(EVENTS, None, ""))

    def codes(look: Greeted) -> list[str]:
        return [one.code for one in judge_loads(ABOUT, sources, {NEXT: look})]

    assert codes(PUB) == [""]
    assert codes(CLOSED) == ["load-nobody-listens"]
    assert codes(Greeted()) == ["load-not-zmq"]
    assert codes(ROUTER) == codes(Greeted(mechanism="CURVE")) == ["load-wrong-socket"]


def test_who_says_nothing_may_hang() -> None:
    assert "hangs" in Greeted(is_silent=True).fault
    assert "not speak ZMQ" in Greeted().fault


def test_a_socket_that_does_not_say_its_kind_may_be_either() -> None:
    silent = Greeted(mechanism="NULL")
    assert is_publisher(silent)
    assert is_replayer(silent)
    assert not is_publisher(ROUTER)
    assert not is_replayer(PUB)


A, B = ZmqSource("tcp://h:1", "tcp://h:2", ""), ZmqSource("tcp://h:3", "tcp://h:4", "")


def telling(worker: str, ours: ZmqSource, theirs: ZmqSource | None) -> Telling:
    told = None if theirs is None else Told((theirs,), "/kv_event_sources")
    return Telling(worker, (ours,), told)


def swaps(*fleet: Telling) -> list[tuple[str, str]]:
    return [(one.subject, one.code) for one in judge_swapped(fleet)]


def test_a_place_that_another_worker_names_as_its_own_is_swapped() -> None:
    assert swaps(telling("a", A, A), telling("b", B, B)) == []
    assert swaps(telling("a", B, A), telling("b", A, B)) == [
        ("worker a", "feed-swapped"),
        ("worker a", "replay-swapped"),
        ("worker b", "feed-swapped"),
        ("worker b", "replay-swapped"),
    ]


def test_of_a_worker_that_does_not_tell_nothing_is_said() -> None:
    assert swaps(telling("a", B, None), telling("b", B, B)) == []


def test_a_place_that_several_workers_name_is_nobodys() -> None:
    assert swaps(telling("a", A, A), telling("b", A, A)) == []


def test_a_place_that_nobody_names_may_be_mapped() -> None:
    assert swaps(telling("a", B, A)) == [("worker a", "")]
    binds = ZmqSource("tcp://h:3", None, "", binds=True)
    assert swaps(telling("a", binds, A)) == []
    on_another_host = ZmqSource("tcp://name:1", None, "")
    assert swaps(telling("a", on_another_host, A)) == []
