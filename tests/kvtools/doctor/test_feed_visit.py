import zmq

from kvstate.feeds.feed_sources import ZmqSource
from kvtools.doctor.feed_visit import (
    PUBLISHERS,
    REPLAYERS,
    FeedReport,
    Greeting,
    is_publisher,
    is_replayer,
    judge_loads,
    judge_places,
    judge_replays,
    judge_reported,
    judge_swapped,
)
from kvtools.doctor.findings import Subject
from kvtools.doctor.worker_visit import ReportedSources

ABOUT = Subject("worker")
PUB = Greeting(mechanism="NULL", socket="PUB")
ROUTER = Greeting(mechanism="NULL", socket="ROUTER")
CLOSED = Greeting(reason="connection refused")
EVENTS, REPLAY, NEXT = "tcp://h:1", "tcp://h:9", "tcp://h:2"
ONE = (ZmqSource(EVENTS, REPLAY, ""),)
TWO = (*ONE, ZmqSource(NEXT, None, ""))


def told_codes(*theirs: ZmqSource, ours: tuple[ZmqSource, ...] = ONE) -> list[str]:
    return [
        one.code
        for one in judge_reported(ABOUT, ours, ReportedSources(theirs, "/kv_event_sources"))
    ]


def place_code(greeting: Greeting) -> list[str]:
    return [one.code for one in judge_places(ABOUT, ONE, {EVENTS: greeting}, None)]


def test_judge_reported_accepts_a_worker_without_an_announcement() -> None:
    assert not list(judge_reported(ABOUT, ONE, None))
    assert told_codes(*ONE) == []


def test_judge_reported_believes_the_announcement_of_a_worker() -> None:
    assert told_codes() == ["events-off"]
    assert told_codes(*TWO) == ["ranks-miscounted"]
    assert told_codes(*ONE, ours=(ZmqSource(EVENTS, REPLAY, "kv"),)) == ["topic-wrong"]
    assert told_codes(*ONE, ours=(ZmqSource(EVENTS, None, ""),)) == ["replay-unused"]


def test_judge_places_names_the_server_at_the_feed_port() -> None:
    assert place_code(PUB) == []
    assert place_code(CLOSED) == ["feed-nobody-listens"]
    assert place_code(Greeting()) == ["feed-not-zmq"]
    assert place_code(Greeting(mechanism="CURVE")) == ["feed-secured"]
    assert place_code(ROUTER) == ["feed-wrong-socket"]


def test_publishers_and_replayers_have_the_names_of_libzmq() -> None:
    assert {zmq.SocketType.PUB.name, zmq.SocketType.XPUB.name} == set(PUBLISHERS)
    assert {zmq.SocketType.ROUTER.name} == set(REPLAYERS)


def test_missing_rank_beside_another_is_miscounted() -> None:
    (one,) = judge_places(ABOUT, TWO, {EVENTS: PUB, NEXT: CLOSED}, None)
    assert (one.code, one.says) == ("rank-missing", "rank 1: tcp://h:2: connection refused")


def test_judge_places_names_the_port_that_the_worker_announces() -> None:
    elsewhere = ReportedSources((ZmqSource("tcp://h:7", None, ""),), "/kv_event_sources")
    (one,) = judge_places(ABOUT, ONE, {EVENTS: CLOSED}, elsewhere)
    assert one.says.endswith("the worker reports that it publishes at tcp://h:7")
    same = ReportedSources((ZmqSource("tcp://other:1", None, ""),), "/kv_event_sources")
    (one,) = judge_places(ABOUT, ONE, {EVENTS: CLOSED}, same)
    assert one.says.endswith("refused")


def test_judge_replays_names_the_server_at_the_replay_port() -> None:
    def codes(greeting: Greeting) -> list[str]:
        return [one.code for one in judge_replays(ABOUT, TWO, {REPLAY: greeting})]

    assert codes(ROUTER) == []
    assert codes(CLOSED) == ["replay-nobody-listens"]
    assert codes(Greeting()) == ["replay-not-zmq"]
    assert codes(PUB) == ["replay-wrong-socket"]


def test_judge_loads_names_the_server_at_the_load_port() -> None:
    sources = (ZmqSource(EVENTS, None, "", load=NEXT), ZmqSource(EVENTS, None, ""))

    def codes(greeting: Greeting) -> list[str]:
        return [one.code for one in judge_loads(ABOUT, sources, {NEXT: greeting})]

    assert codes(PUB) == [""]
    assert codes(CLOSED) == ["load-nobody-listens"]
    assert codes(Greeting()) == ["load-not-zmq"]
    assert codes(ROUTER) == codes(Greeting(mechanism="CURVE")) == ["load-wrong-socket"]


def test_silent_server_may_hang() -> None:
    assert "hangs" in Greeting(is_silent=True).fault
    assert "not speak ZMQ" in Greeting().fault


def test_socket_of_an_unnamed_kind_may_be_either() -> None:
    silent = Greeting(mechanism="NULL")
    assert is_publisher(silent)
    assert is_replayer(silent)
    assert not is_publisher(ROUTER)
    assert not is_replayer(PUB)


A, B = ZmqSource("tcp://h:1", "tcp://h:2", ""), ZmqSource("tcp://h:3", "tcp://h:4", "")


def report(worker: str, ours: ZmqSource, theirs: ZmqSource | None) -> FeedReport:
    shown = None if theirs is None else ReportedSources((theirs,), "/kv_event_sources")
    return FeedReport(worker, (ours,), shown)


def swaps(*fleet: FeedReport) -> list[tuple[str, str]]:
    return [(one.subject, one.code) for one in judge_swapped(fleet)]


def test_judge_swapped_finds_a_place_that_another_worker_announces() -> None:
    assert swaps(report("a", A, A), report("b", B, B)) == []
    assert swaps(report("a", B, A), report("b", A, B)) == [
        ("worker a", "feed-swapped"),
        ("worker a", "replay-swapped"),
        ("worker b", "feed-swapped"),
        ("worker b", "replay-swapped"),
    ]


def test_judge_swapped_ignores_a_worker_without_an_announcement() -> None:
    assert swaps(report("a", B, None), report("b", B, B)) == []


def test_judge_swapped_ignores_a_place_that_several_workers_announce() -> None:
    assert swaps(report("a", A, A), report("b", A, A)) == []


def test_judge_swapped_notes_a_place_that_no_worker_announces() -> None:
    assert swaps(report("a", B, A)) == [("worker a", "")]
    binds = ZmqSource("tcp://h:3", None, "", binds=True)
    assert swaps(report("a", binds, A)) == []
    on_another_host = ZmqSource("tcp://name:1", None, "")
    assert swaps(report("a", on_another_host, A)) == []
