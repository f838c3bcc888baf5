from extproc.config import schema
from extproc.fleet.discovery.view import Sighting
from extproc.fleet.records.worker import SelfReport
from tests.extproc.fleet.answering import worker
from tests.extproc.fleet.fleets import members, workers
from tests.waiting import until


async def test_worker_that_no_longer_learns_is_no_longer_asked() -> None:
    listed = {"data": [{"id": "b"}]}
    async with worker(**{"v1/models": listed}) as endpoint:
        one = workers(f"{{endpoint: '{endpoint}', learn: true}}")
        await one.start()
        record = one.records[endpoint]
        await until(lambda: record.self_report.model == "b")
        await one.replace(members(Sighting(schema.WorkerSettings(endpoint, "a"))))
        assert one.records[endpoint] is record
        assert (record.self_report, "models" in record.polls) == (SelfReport(), False)
        await one.close()


async def test_close_asks_no_worker_any_more() -> None:
    one = workers('{endpoint: "127.0.0.1:1", learn: true}')
    await one.start()
    (record,) = one.records.values()
    assert record.polls
    await one.close()
    assert not record.polls
