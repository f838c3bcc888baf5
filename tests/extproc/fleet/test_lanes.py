import pytest

from extproc.config import schema
from extproc.fleet.discovery.view import Sighting
from tests.extproc.fleet.fleets import following, members, workers


async def test_unready_worker_gets_no_requests() -> None:
    one = workers('{endpoint: "127.0.0.1:9", model: a}')
    await one.replace(
        members(Sighting(schema.WorkerSettings("127.0.0.1:1", "a"), "its pod is not ready"))
    )
    assert one.candidates.list_for("a")[0].excluded == "its pod is not ready"
    assert one.lanes.answering() == {"a": [("127.0.0.1:1", False)]}
    await one.close()


async def test_draining_is_set_by_a_source_and_by_an_operator() -> None:
    one = workers(
        '{endpoint: "127.0.0.1:1", model: a, draining: true}, {endpoint: "h:2", model: a}'
    )
    assert one.candidates.draining() == {"127.0.0.1:1"}
    assert one.drain("h:2", draining=True)
    assert one.candidates.draining() == {"127.0.0.1:1", "h:2"}
    assert one.drain("h:2", draining=False)
    assert not one.drain("nobody:1", draining=True)
    assert one.lanes.answering() == {"a": [("127.0.0.1:1", False)]}


async def test_worker_has_no_endpoint_before_its_address_and_model_are_known() -> None:
    one = workers('{endpoint: "h:1", learn: true}, {endpoint: "127.0.0.1:2", model: a}')
    assert one.lanes.unplaced() is None
    await one.replace(
        members(Sighting(schema.WorkerSettings("127.0.0.1:3")), following("127.0.0.1:2"))
    )
    assert one.lanes.unplaced() == {"127.0.0.1:3"}
    await one.close()


@pytest.mark.parametrize(("connector", "is_open"), [("sglang", False), ("mooncake", True)])
def test_decode_worker_is_open_only_if_it_answers_alone(connector: str, is_open: bool) -> None:
    one = workers(
        '{endpoint: "127.0.0.1:1", model: a, role: prefill, transfer_port: 9},'
        '{endpoint: "127.0.0.1:2", model: a, role: decode}',
        more=f"disaggregation: {{mode: mirror, connector: {connector}}}",
    )
    assert one.lanes.answering() == {"a": [("127.0.0.1:2", is_open)]}
    assert one.lanes.prefill() == {"a": [("127.0.0.1:1", True)]}
