"""A gateway's client like NGINX Gateway Fabric's: it sends headers, body and end of stream at once.

It names no protocol, sends neither method nor path, and takes the pick from the answer to the
headers alone.
"""

import json

import grpc.aio

from extproc.base.headers import DESTINATION
from extproc.pb.kvsteer_ext_proc_pb2 import HeaderMap, ProcessingRequest, ProcessingResponse
from tests.extproc.serving.gateway_parsers import GATEWAYS
from tests.ports import free_port
from tests.system.system import chat, long_text, running
from tests.waiting import until

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"


def messages(body: bytes) -> list[ProcessingRequest]:
    """A request, without protocol_config; values as text, as that client sends them."""
    headers, content = ProcessingRequest(), ProcessingRequest()
    pairs = {"content-type": "application/json", "content-length": str(len(body))}
    headers.request_headers.headers.CopyFrom(
        HeaderMap(headers=[{"key": key, "value": value} for key, value in pairs.items()])
    )
    content.request_body.body = body
    content.request_body.end_of_stream = True
    return [headers, content]


async def picked(address: str, body: bytes) -> str:
    """The endpoints that a picker names for a request."""
    async with grpc.aio.insecure_channel(address) as channel:
        process = channel.stream_stream(
            PROCESS,
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )
        answers = [answer async for answer in process(iter(messages(body)), timeout=30)]
    (first, *_) = answers
    mutation = first.request_headers.response.header_mutation
    found: dict[str, bytes] = {one.header.key: one.header.raw_value for one in mutation.set_headers}
    return found[DESTINATION].decode()


async def test_client_that_ends_its_stream_at_once_gets_its_pick() -> None:
    listen = f"127.0.0.1:{free_port()}"
    extproc = {"listen": listen, "dialect": "epp"}
    async with running(changes={"extproc": extproc}) as system:
        body = chat(long_text("alpha"))
        _, holder, _ = await system.send(body)
        await system.learned(body, holder)
        for _ in range(6):  # more than chance would name the holder
            named = await picked(listen, json.dumps(body).encode())
            assert [read(named) for read in GATEWAYS.values()] == [[holder]] * len(GATEWAYS)
        await until(lambda: system.in_flight(0), "nothing in flight")
