"""With `disaggregation.mode: mirror`, no client says where its prompt is computed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from extproc.config.owned_headers import owned_headers
from extproc.config.schema import Config
from extproc.config.sections import Disaggregation
from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from tests.extproc.messages import body, head
from tests.system.attacks.peer import PROCESS
from tests.system.attacks.victim import Victim, running_victim

RULES = Config(disaggregation=Disaggregation("mirror", "sglang"))
FORGED = dict.fromkeys(owned_headers(RULES), "10.0.0.1:8000")
BODIES = {
    "a prompt": b'{"model": "m", "prompt": [1, 2, 3]}',
    "no JSON": b"\xff\xfe{",
    "another model": b'{"model": "another", "prompt": "x"}',
    "nothing": b"",
}


@pytest.fixture(scope="module")
def mirroring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victim]:
    """A router that has Envoy mirror requests."""
    folder: Path = tmp_path_factory.mktemp("mirror")
    sections = "disaggregation: {mode: mirror, connector: sglang}"
    with running_victim(folder, sections=sections) as victim:
        yield victim


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/unknown", "/v1//completions", "/health"])
@pytest.mark.parametrize("content", BODIES.values(), ids=BODIES)
async def test_headers_of_legs_that_a_client_sets_are_removed(
    mirroring: Victim, path: str, content: bytes
) -> None:
    async with mirroring.channel() as channel:
        call = channel.stream_stream(
            PROCESS,
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )()
        await call.write(head(path, headers=FORGED, end_of_stream=not content))
        answers = [await call.read()]
        if content and not answers[0].request_headers.response.header_mutation.remove_headers:
            await call.write(body(content))
            answers.append(await call.read())
        await call.done_writing()
    mutations = [
        (
            one.request_headers if one.HasField("request_headers") else one.request_body
        ).response.header_mutation
        for one in answers
    ]
    changed = {name for one in mutations for name in one.remove_headers}
    changed |= {each.header.key for one in mutations for each in one.set_headers}
    values = {each.header.raw_value for one in mutations for each in one.set_headers}
    assert changed >= set(FORGED)
    assert b"10.0.0.1:8000" not in values
