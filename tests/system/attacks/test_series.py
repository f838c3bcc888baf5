"""What a client names anew in each request makes no new series of metrics, and no memory."""

import aiohttp
import pytest

from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from tests.extproc.messages import body, head
from tests.system.attacks.peer import PROCESS
from tests.system.attacks.victim import Victim

TIMES = 200
MAX_NEW = 40  # series that a first request of a kind adds


async def series(victim: Victim) -> set[str]:
    """The names of all series, with their labels."""
    url = f"http://127.0.0.1:{victim.http_ports[1]}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        lines = (await response.text()).splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


def request(what: str, number: int) -> tuple[ProcessingRequest, ProcessingRequest]:
    """A request with one thing that no other one has."""
    model = f"model-{number}" if what == "model" else "m"
    path = {"path": f"/v1/unknown-{number}", "escaped path": f"/v1/completions%2f{number}"}
    named = {"x-request-id": f"r-{number}", "x-session-id": f"s-{number}"} if what == "ids" else {}
    method = f"VERB{number}" if what == "method" else "POST"
    content = f'{{"model": "{model}", "prompt": "text {number}", "field-{number}": 1}}'
    sent = head(path.get(what, "/v1/completions"), headers={**named, ":method": method})
    return sent, body(content.encode())


@pytest.mark.parametrize("what", ["model", "path", "escaped path", "ids", "method"])
async def test_names_that_clients_choose_make_no_series(victim: Victim, what: str) -> None:
    before = await series(victim)
    async with victim.channel() as channel:
        for number in range(1, TIMES):
            call = channel.stream_stream(
                PROCESS,
                request_serializer=ProcessingRequest.SerializeToString,
                response_deserializer=ProcessingResponse.FromString,
            )()
            for message in request(what, number):
                await call.write(message)
            await call.done_writing()
            async for _ in call:
                pass
    assert len(await series(victim) - before) <= MAX_NEW
