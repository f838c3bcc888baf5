from typing import Any

import pytest

from extproc.config import schema
from extproc.fleet.discovery.view import Sighting
from tests.extproc.fleet.answering import worker
from tests.extproc.fleet.fleets import EVENTS, members, workers
from tests.memory_transport import MemoryTransport
from tests.waiting import until


async def test_candidates_exclude_workers_of_other_models() -> None:
    one = workers('{endpoint: "127.0.0.1:1", model: a}')
    assert one.candidates.list_for("b")[0].excluded == "serves a"
    assert (one.candidates.endpoints("a"), one.candidates.endpoints("b")) == (["127.0.0.1:1"], [])


async def test_adapters_of_a_candidate_are_those_configured() -> None:
    one = workers(
        '{endpoint: "127.0.0.1:1", model: a, lora: [x]}, {endpoint: "127.0.0.1:2", model: a}'
    )
    assert [each.loras for each in one.candidates.list_for("a")] == [frozenset({"x"}), None]


async def test_empty_list_of_adapters_overrides_the_answer_of_a_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "kvsteer.workers")
    listed = {"data": [{"id": "a"}, {"id": "x", "parent": "a"}]}
    async with worker(**{"v1/models": listed}) as endpoint:
        one = workers(
            f"{{endpoint: '{endpoint}', learn: true}},"
            f" {{endpoint: '127.0.0.1:1', model: a, learn: true, lora: []}}"
        )
        await one.start()
        await until(lambda: one.candidates.list_for("a")[0].loras == frozenset({"x"}))
        assert one.candidates.list_for("a")[1].loras == frozenset()
        assert "model a, 1 adapter, block size unknown" in caplog.text
        await one.close()


async def test_worker_of_an_unknown_model_is_excluded_until_it_answers() -> None:
    listed = {"data": [{"id": "b"}, {"id": "x", "parent": "b"}]}
    async with worker(**{"v1/models": listed, "server_info": {"page_size": 64}}) as endpoint:
        made: list[MemoryTransport] = []
        one = workers(f"{{endpoint: '{endpoint}', learn: true, events: {EVENTS}}}", made)
        await one.start()
        assert one.candidates.list_for("b")[0].excluded == "its model is not known yet"
        await until(lambda: bool(made))
        (candidate,) = one.candidates.list_for("b")
        assert (candidate.excluded, candidate.loras) == ("", frozenset({"x"}))
        (status,) = one.states.statuses()
        assert (status["model"], status["block_size"], status["lora"]) == ("b", 64, ["x"])
        await one.close()


async def test_learned_model_is_dropped_for_the_next_engine() -> None:
    answers: dict[str, Any] = {"v1/models": {"data": [{"id": "b"}, {"id": "x", "parent": "b"}]}}
    async with worker(**answers) as endpoint:
        one = workers('{endpoint: "127.0.0.1:9", model: a}')
        await one.start()
        asked = schema.WorkerSettings(endpoint, learn=True)
        await one.replace(members(Sighting(asked, identity="old")))
        await until(lambda: one.candidates.model_of(one.records[endpoint]) == "b")
        answers["v1/models"]["data"] = [{"id": "a"}]
        await one.replace(members(Sighting(asked, identity="new")))
        assert one.candidates.model_of(one.records[endpoint]) is None
        await until(lambda: one.candidates.model_of(one.records[endpoint]) == "a")
        assert [each.loras for each in one.candidates.list_for("a")] == [None]
        await one.close()
