"""A worker that pulls a part of a prompt from another one that holds more, behind a real Envoy."""

from kvtools.simulator.worker import SimulatedWorker
from tests.system.disaggregation.test_disaggregation import queried
from tests.system.system import System, chat, long_text, running

PULLING = {"connector": "offloading", "min_pulled_tokens": 64}
THEIRS = {"kv_request_id": "1", "remote_host": "127.0.0.1", "remote_port": 1}


def by_endpoint(system: System, endpoint: str) -> SimulatedWorker:
    return next(one for one in system.workers if one.endpoint == endpoint)


async def test_prefix_is_pulled_from_its_holder_against_a_source_of_the_client() -> None:
    changes = {"disaggregation": PULLING, "policy": {"name": "round_robin"}}
    async with running(roles=("both", "both"), changes=changes) as system:
        body = chat(long_text("alpha"), kv_transfer_params={"remote_kv_source": THEIRS})
        status, first, _ = await system.send(body)
        assert status == 200
        assert sum(one.transfer.pulled_tokens for one in system.workers) == 0
        await system.learned(body, first)
        while (told := await system.explain(body))["pick"][0] == first:
            await system.send(chat("another one's turn"))
        assert told["source"]["endpoint"] == first
        status, second, _ = await system.send(body)
        assert (status, second == first) == (200, False)
        pulled = by_endpoint(system, second).transfer.pulled_tokens
        assert 100 < pulled == told["source"]["tokens"] < queried(by_endpoint(system, second))
        await system.learned(body, second)
        assert (await system.send(body))[0] == 200  # now both hold it
        assert sum(one.transfer.pulled_tokens for one in system.workers) == pulled
