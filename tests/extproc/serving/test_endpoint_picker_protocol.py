"""What the Endpoint Picker Protocol 1.0.0 demands of a picker, sentence by sentence.

Gateway API inference extension, proposal 004. Its sections name the parts of this file.
"""

from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.json_format import MessageToDict, ParseDict

from extproc.pb.kvsteer_ext_proc_pb2 import (
    HttpBody,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
)
from extproc.pb.kvsteer_health_pb2 import HealthCheckRequest, HealthCheckResponse
from extproc.serving.exchange import Exchange, Service
from extproc.serving.lean_server import LeanServer
from tests.extproc.messages import answers_of, body, head, read, response_head
from tests.extproc.serving.gateway_parsers import GATEWAYS, istio
from tests.extproc.serving.routers import FIRST, SECOND, service
from tests.extproc.settled import at_once
from tests.ports import free_port

DESTINATION = "x-gateway-destination-endpoint"
PROMPT = b'{"model": "m", "prompt": [1, 2, 3]}'
STREAMED = ProcessingMode.FULL_DUPLEX_STREAMED


@pytest.fixture
def one() -> Iterator[Service]:
    made = service()
    yield made
    made.router.close()


def told(message: ProcessingRequest, namespace: str, key: str, value: object) -> ProcessingRequest:
    ParseDict({key: value}, message.metadata_context.filter_metadata[namespace])
    return message


def first_message(hint: object = None) -> ProcessingRequest:
    message = head("/v1/completions", mode=STREAMED, response_mode=STREAMED)
    if hint is not None:
        told(message, "envoy.lb.subset_hint", f"{DESTINATION}-subset", hint)
    return message


def asked(exchange: Exchange, hint: object = None) -> list[ProcessingResponse]:
    """The answers to a request."""
    assert at_once(exchange.receive(read(first_message(hint)))) == []
    return answers_of(at_once(exchange.receive(read(body(PROMPT)))))


def header_of(answer: ProcessingResponse) -> str:
    options = answer.request_headers.response.header_mutation.set_headers
    (value,) = [one.header.raw_value for one in options if one.header.key == DESTINATION]
    return value.decode()


def metadata_of(answer: ProcessingResponse) -> str:
    value: str = MessageToDict(answer.dynamic_metadata)["envoy.lb"][DESTINATION]
    return value


# Proposal


def test_picker_supports_streamed_requests_and_responses(one: Service) -> None:
    exchange = one.open()
    assert [each.WhichOneof("response") for each in asked(exchange)] == [
        "request_headers",
        "request_body",
    ]
    at_once(exchange.receive(read(response_head(200))))
    for token in (b"data: a\n\n", b"data: b\n\n"):
        piece = ProcessingRequest(response_body=HttpBody(body=token))
        (answer,) = answers_of(at_once(exchange.receive(read(piece))))
        part = answer.response_body.response.body_mutation.streamed_response
        assert (part.body, part.end_of_stream) == (token, False)
    exchange.close()


# Endpoint Subset


@pytest.mark.parametrize("hint", [[SECOND], SECOND, ["10.9.9.9:9", SECOND]])
def test_picker_selects_endpoints_of_the_subset_only(one: Service, hint: object) -> None:
    for _ in range(8):
        exchange = one.open()
        assert header_of(asked(exchange, hint)[0]) == SECOND


@pytest.mark.parametrize("hint", [[], "", ["10.9.9.9:9"], "10.9.9.9:9", [5], 5, {"a": 1}, True])
def test_picker_answers_503_for_a_subset_without_an_eligible_endpoint(
    one: Service, hint: object
) -> None:
    (answer,) = asked(one.open(), hint)
    assert answer.immediate_response.status.code == 503


def test_picker_selects_from_the_whole_pool_without_a_subset(one: Service) -> None:
    picks = {header_of(asked(one.open())[0]).partition(",")[0] for _ in range(40)}
    assert picks == {FIRST, SECOND}


# Destination Endpoint


def test_picker_names_the_same_endpoints_in_header_and_metadata(
    one: Service,
) -> None:
    answer = asked(one.open())[0]
    assert header_of(answer) == metadata_of(answer)
    assert metadata_of(answer) in {FIRST, SECOND}


@pytest.mark.parametrize("gateway", GATEWAYS)
@pytest.mark.parametrize("endpoints", [(FIRST, SECOND), ("[::1]:8000", "[2001:db8::1]:8000")])
def test_picker_header_suits_every_gateway(gateway: str, endpoints: tuple[str, str]) -> None:
    one = service("", *endpoints)
    (named,) = GATEWAYS[gateway](header_of(asked(one.open())[0]))
    assert named in endpoints
    one.router.close()


def test_picker_header_with_a_list_suits_istio_only() -> None:
    one = service("policy: {endpoints: 2}")
    value = header_of(asked(one.open())[0])
    assert set(istio(value)) == {FIRST, SECOND}
    for name in GATEWAYS.keys() - {"istio"}:
        with pytest.raises(ValueError, match=r"port|octets"):
            GATEWAYS[name](value)
    one.router.close()


def test_picker_answers_503_without_a_ready_endpoint() -> None:
    nobody = service("", "no-such-host.invalid:1")
    (answer,) = asked(nobody.open())
    refusal = answer.immediate_response
    assert refusal.status.code == 503
    assert refusal.body
    nobody.router.close()


def test_picker_answers_429_for_a_shed_request() -> None:
    busy = service("policy: {max_in_flight: 1, shed: true}", FIRST)
    asked(busy.open())
    (answer,) = asked(busy.open())
    refusal = answer.immediate_response
    assert refusal.status.code == 429
    assert refusal.headers.set_headers[-1].header.key == "retry-after"
    busy.router.close()


def test_picker_names_an_endpoint_for_a_request_without_a_body(one: Service) -> None:
    message = head("/v1/models", method="GET", mode=STREAMED, end_of_stream=True)
    (answer,) = answers_of(at_once(one.open().receive(read(message))))
    assert header_of(answer) == metadata_of(answer)


# Destination Endpoint Served


def test_picker_reads_the_served_endpoint_of_a_response(one: Service) -> None:
    exchange = one.open()
    pick = header_of(asked(exchange, [FIRST])[0])
    assert (pick, one.router.in_flight(FIRST)) == (FIRST, 1)
    at_once(
        exchange.receive(
            read(told(response_head(200), "envoy.lb", f"{DESTINATION}-served", SECOND))
        )
    )
    assert (one.router.in_flight(FIRST), one.router.in_flight(SECOND)) == (0, 1)
    exchange.close()
    assert one.router.in_flight(SECOND) == 0


# Health Checking


async def test_health_service_covers_liveness_readiness_and_the_picker() -> None:
    listen = f"127.0.0.1:{free_port()}"
    made = service(f"extproc: {{listen: '{listen}'}}")
    ready = True
    server = LeanServer(made, lambda: ready)
    await server.start()
    async with grpc.aio.insecure_channel(listen) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=HealthCheckRequest.SerializeToString,
            response_deserializer=HealthCheckResponse.FromString,
        )
        serving, not_serving = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
        expected = {True: serving, False: not_serving}
        for ready in (True, False):
            for name in ("readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
                assert (await check(HealthCheckRequest(service=name))).status == expected[ready]
            assert (await check(HealthCheckRequest(service="liveness"))).status == serving
    await server.stop()
    made.router.close()
