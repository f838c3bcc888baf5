"""Workers whose engines sleep, by their metrics."""

import asyncio

from extproc.fleet.asking.polling import Client, Polling
from extproc.fleet.health.doubts import Doubts
from extproc.fleet.health.sleeping import AGAIN_SECONDS, Sleeping
from extproc.fleet.records.table import Table
from extproc.fleet.records.worker import Worker
from extproc.routing.health.evidence import Judge
from tests.extproc.fleet.asked import METRICS, Engine, against, only, table_of
from tests.extproc.fleet.fleets import EVENTS, until_live, workers
from tests.extproc.routing.load.test_load_samples import sleep_metrics
from tests.waiting import until


def metrics(state: str) -> str:
    """The metrics of an engine in this state, "" if it is paused or wakes up."""
    return METRICS + sleep_metrics(state)


class Followed:
    """What a table's workers sent, and which of them changed."""

    def __init__(self, table: Table) -> None:
        self.batches, self.now = 5, 0.0
        self.changed: list[int | None] = []
        self.sleeping = Sleeping(table, lambda _: self.batches, self.note, lambda: self.now)

    def note(self, worker: Worker) -> None:
        self.changed.append(worker.void_at)


def test_sleeping_worker_is_left_out_until_it_is_awake() -> None:
    table = table_of("127.0.0.1:1")
    one, worker = Followed(table).sleeping, only(table)
    one.note(worker, metrics("weights_offloaded").encode())
    assert against(table, Judge.SLEEP) == {"127.0.0.1:1": "its engine sleeps at level 1"}
    (fault,) = one.faults()
    assert (fault.code, fault.subject) == ("worker-asleep", "worker 127.0.0.1:1")
    one.note(worker, METRICS.encode())  # which says nothing
    assert against(table, Judge.SLEEP)
    one.note(worker, metrics("awake").encode())
    assert (against(table, Judge.SLEEP), list(one.faults())) == ({}, [])


def test_cache_that_sleep_dropped_is_void_until_the_feed_speaks_again() -> None:
    table = table_of("127.0.0.1:1")
    followed, worker = Followed(table), only(table)
    for state in ("discard_all", "discard_all", "", "awake"):
        followed.sleeping.note(worker, metrics(state).encode())
    assert (followed.changed, worker.holdings.lost_at) == ([5], 0.0)
    followed.batches += 1
    followed.sleeping.note(worker, metrics("awake").encode())
    assert followed.changed == [5, None]


def test_paused_engine_keeps_its_cache() -> None:
    table = table_of("127.0.0.1:1")
    followed = Followed(table)
    followed.sleeping.note(only(table), metrics("").encode())
    assert (followed.changed, bool(against(table, Judge.SLEEP))) == ([], True)


async def test_worker_in_doubt_is_asked_whether_it_sleeps_now_and_then(
    engine: Engine, http: Client
) -> None:
    table = table_of(engine.endpoint)
    followed, worker = Followed(table), only(table)
    engine.text = metrics("awake")
    for _ in range(3):
        await followed.sleeping.ask(http, worker)
    assert engine.asked == 1
    engine.text, followed.now = metrics("discard_all"), AGAIN_SECONDS
    for _ in range(3):  # one that sleeps is asked each time
        await followed.sleeping.ask(http, worker)
    assert (engine.asked, worker.asleep) == (4, "its engine sleeps at level 2")


async def test_worker_that_does_not_answer_sleeps_as_before(http: Client) -> None:
    table = table_of("127.0.0.1:1")
    followed, worker = Followed(table), only(table)
    followed.sleeping.note(worker, metrics("discard_all").encode())
    await followed.sleeping.ask(http, worker)
    assert worker.asleep


async def test_doubts_find_a_worker_that_sleeps_and_one_that_woke(
    engine: Engine, http: Client
) -> None:
    table, polling = table_of(engine.endpoint), Polling(lambda: http)
    followed, clock = Followed(table), asyncio.get_running_loop().time
    doubts = Doubts(table, polling, lambda _: (False, 0), clock, followed.sleeping.ask)
    engine.text = metrics("weights_offloaded")
    polling.start([doubts.check])
    table.upstreams.doubt(engine.endpoint, is_doubted=True)
    await until(lambda: against(table, Judge.SLEEP))
    assert [one.is_suspect for one in table.upstreams] == [False]
    engine.text = metrics("awake")
    await until(lambda: not against(table, Judge.SLEEP))
    await polling.close()


async def test_credit_of_a_void_cache_is_uncertain() -> None:
    one = workers(f'{{endpoint: "127.0.0.1:1", model: a, events: {EVENTS}}}')
    await one.start()
    await until_live(one)
    (worker,) = one.records.values()
    one.sleeping.note(worker, metrics("discard_all").encode())
    assert not one.followed.blocks._rules[worker.name].is_certain
    assert one.states.down("127.0.0.1:1") == "its engine sleeps at level 2"
    await one.close()
