"""The doctor beside a running router whose features are configured, and get nothing."""

import pytest

from extproc.config.sections import StoreSettings
from kvtools.doctor.features_visit import judge_port
from kvtools.doctor.feed_visit import Greeting
from kvtools.doctor.findings import Subject
from tests.kvtools.doctor.fleet import codes_of, one_worker
from tests.ports import free_port

PUBLISHER = Greeting(mechanism="NULL", socket="PUB")


@pytest.mark.parametrize(
    ("greeting", "words"),
    [
        (PUBLISHER, "is a ZMQ publisher"),
        (Greeting("Connection refused"), "Connection refused"),
        (Greeting(), "does not speak ZMQ"),
        (Greeting(mechanism="CURVE"), "requires ZMQ's CURVE"),
        (Greeting(mechanism="NULL", socket="ROUTER"), "is a ROUTER socket"),
    ],
)
def test_port_of_a_store_is_a_publishers(greeting: Greeting, words: str) -> None:
    one = judge_port(Subject("store s"), "tcp://h:1", greeting)
    assert words in one.says
    assert (one.code == "store-port") == (greeting != PUBLISHER)


async def test_store_whose_port_nobody_has_is_found() -> None:
    async with one_worker() as (_, worker):
        store = StoreSettings("s", (worker.endpoint,), zmq=f"tcp://127.0.0.1:{free_port()}")
        assert "store-port" in await codes_of(worker, stores=(store,))
