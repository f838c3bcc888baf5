import json
from collections.abc import Iterator
from typing import cast

import pytest
from google.protobuf.json_format import ParseDict
from prometheus_client import generate_latest

from extproc.config.owned_headers import owned_headers
from extproc.features.feature import NOTHING_WRITTEN, Feature, Written
from extproc.features.hooks import Hooks
from extproc.pb.kvsteer_ext_proc_pb2 import (
    HttpBody,
    ProcessingMode,
    ProcessingRequest,
    ProcessingResponse,
)
from extproc.requests.added_fields import Body, with_fields
from extproc.requests.refusals import Refusal, crowded_out
from extproc.requests.request import RoutingRequest
from extproc.routing.decision import Decision
from extproc.routing.health.evidence import RULES, Judge
from extproc.routing.ledger import REQUESTS_A_LOOK, Ledger
from extproc.serving.exchange import Exchange, Service
from tests.extproc.messages import answers_of, body, head, read, response_head
from tests.extproc.serving.routers import (
    FIRST,
    SECOND,
    books,
    counted,
    fleet,
    in_flight,
    of,
    released,
    seen,
    service,
)
from tests.extproc.settled import at_once

PROMPT = json.dumps({"model": "m", "prompt": list(range(512))}).encode()
JSON = {"content-type": "application/json"}
HEADERS = "accounting: {responses: headers}"
USAGE = "accounting: {responses: usage}"


@pytest.fixture
def closing() -> Iterator[list[Service]]:
    opened: list[Service] = []
    yield opened
    for one in opened:
        one.router.close()


def answers(exchange: Exchange, message: ProcessingRequest) -> list[ProcessingResponse]:
    return answers_of(at_once(exchange.receive(read(message))))


def placed(one: Service, *, mode: int = ProcessingMode.BUFFERED) -> tuple[Exchange, str]:
    """A stream whose request was placed, and its first pick."""
    exchange = one.open()
    answers(exchange, head("/v1/completions", mode=mode))
    answer = answers(exchange, body(PROMPT))[0]
    part = answer.request_headers if mode == 4 else answer.request_body
    value = part.response.header_mutation.set_headers[0].header.raw_value.decode()
    return exchange, value.partition(",")[0]


def told(status: int, served: str = "") -> ProcessingRequest:
    """Response headers, with the endpoint that sent them."""
    message = response_head(status, JSON)
    if served:
        fields = {"x-gateway-destination-endpoint-served": served}
        ParseDict(fields, message.metadata_context.filter_metadata["envoy.lb"])
    return message


def response(piece: bytes) -> ProcessingRequest:
    return ProcessingRequest(response_body=HttpBody(body=piece))


@pytest.mark.parametrize("mode", [ProcessingMode.BUFFERED, ProcessingMode.FULL_DUPLEX_STREAMED])
def test_close_releases_the_load_once(mode: int, closing: list[Service]) -> None:
    one = service()
    closing.append(one)
    exchange, _ = placed(one, mode=mode)
    assert in_flight(one) == 1
    exchange.close()
    exchange.close()
    assert (in_flight(one), released(one)) == (0, 1)


@pytest.mark.parametrize("extra", [HEADERS, USAGE])
def test_served_endpoint_takes_over_the_load(extra: str, closing: list[Service]) -> None:
    one = service(extra)
    closing.append(one)
    exchange, pick = placed(one)
    other = SECOND if pick == FIRST else FIRST
    answers(exchange, told(200, other))
    assert (one.router.in_flight(pick), one.router.in_flight(other)) == (0, 1)
    exchange.close()
    assert in_flight(one) == 0
    assert counted(one, f'kvsteer_responses_total{{status="2xx",worker="{other}"}}') == 1
    assert counted(one, 'kvsteer_answered_elsewhere_total{model="m"}') == 1


def sampled(one: Service) -> tuple[Exchange, str]:
    """A stream whose response is shown although none need be, and its first pick."""
    for _ in range(REQUESTS_A_LOOK - 1):
        one.open().close()
    return placed(one)


def told_by_attribute(served: str) -> ProcessingRequest:
    """Response headers, with the endpoint that answered as any Envoy reports it."""
    message = response_head(200, JSON)
    fields = message.attributes["envoy.filters.http.ext_proc"].fields
    fields["upstream.address"].string_value = served
    return message


def test_served_endpoint_is_counted_without_accounting(
    closing: list[Service], caplog: pytest.LogCaptureFixture
) -> None:
    one = service("policy: {name: round_robin}")
    closing.append(one)
    for _ in range(8):  # whatever is picked, the second worker answers
        exchange, _ = sampled(one)
        answers(exchange, told_by_attribute(SECOND))
        assert (one.router.in_flight(FIRST), one.router.in_flight(SECOND)) == (0, 1)
        exchange.close()
    assert seen(one).served_by == [SECOND] * 8
    known = counted(one, f'kvsteer_served_known_total{{worker="{FIRST}"}}')
    assert counted(one, f'kvsteer_served_elsewhere_total{{worker="{FIRST}"}}') == known >= 3
    assert counted(one, f'kvsteer_served_elsewhere_total{{worker="{SECOND}"}}') == 0
    assert "lacks this endpoint" in fleet(one).strays.cause(FIRST)
    assert fleet(one).strays.cause(SECOND) == ""
    suspects = [each.endpoint for each in fleet(one).upstreams if each.is_suspect]
    assert suspects == [FIRST]
    (warning,) = [text for text in caplog.messages if "answered by other servers" in text]
    assert FIRST in warning
    assert "lacks this endpoint" in warning


def test_served_endpoint_outside_the_fleet_releases_the_load(closing: list[Service]) -> None:
    one = service(HEADERS)
    closing.append(one)
    exchange, _ = placed(one)
    answers(exchange, told(200, "10.9.9.9:9"))
    assert in_flight(one) == 0
    exchange.close()
    assert counted(one, 'kvsteer_responses_total{status="2xx",worker=""}') == 1


@pytest.mark.parametrize(
    ("status", "reason"), [(503, "nothing_cached"), (200, "approximate_overlap")]
)
def test_failed_request_claims_nothing(status: int, reason: str, closing: list[Service]) -> None:
    one = service(HEADERS)
    closing.append(one)
    exchange, _ = placed(one)
    answers(exchange, told(status))
    exchange.close()
    before = counted(one, f'kvsteer_decisions_total{{model="m",reason="{reason}"}}')
    placed(one)[0].close()
    assert counted(one, f'kvsteer_decisions_total{{model="m",reason="{reason}"}}') == before + 1


def test_response_headers_are_ignored_without_accounting(closing: list[Service]) -> None:
    one = service()
    closing.append(one)
    exchange, pick = placed(one)
    answers(exchange, told(503, "10.9.9.9:9"))
    assert one.router.in_flight(pick) == 1
    exchange.close()
    assert "kvsteer_responses_total{" not in generate_latest(one.metrics).decode()


def test_mode_override_asks_for_a_sample_of_response_headers(
    closing: list[Service],
) -> None:
    one = service()
    closing.append(one)
    looks = [
        answers(one.open(), head("/v1/completions"))[0].HasField("mode_override")
        for _ in range(2 * REQUESTS_A_LOOK)
    ]
    assert looks == 2 * [*[False] * (REQUESTS_A_LOOK - 1), True]


@pytest.mark.parametrize("extra", ["", HEADERS])
def test_failing_worker_is_left_out(extra: str, closing: list[Service]) -> None:
    one = service("\n".join([extra, "policy: {name: round_robin}"]))
    closing.append(one)
    for _ in range(2 * RULES[Judge.ANSWERS].failures):
        exchange, pick = placed(one)
        answers(exchange, told(503 if pick == FIRST else 200))
        exchange.close()
    assert [placed(one)[1] for _ in range(8)] == [SECOND] * 8


def test_duplex_dialect_always_reads_the_served_endpoint(closing: list[Service]) -> None:
    one = service()
    closing.append(one)
    exchange, pick = placed(one, mode=ProcessingMode.FULL_DUPLEX_STREAMED)
    other = SECOND if pick == FIRST else FIRST
    answers(exchange, told(200, other))
    assert one.router.in_flight(other) == 1
    exchange.close()


def test_usage_is_compared_with_the_prediction(closing: list[Service]) -> None:
    one = service(USAGE)
    closing.append(one)
    exchange, _ = placed(one)
    (answer,) = answers(exchange, told(200))
    assert answer.mode_override.response_body_mode == ProcessingMode.STREAMED
    usage = b'{"usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}}'
    for at in range(len(usage)):
        (answer,) = answers(exchange, response(usage[at : at + 1]))
        assert not answer.response_body.HasField("response")
    exchange.close()
    assert counted(one, 'kvsteer_reported_cached_tokens_total{model="m"}') == 2
    name = 'kvsteer_prediction_error_tokens_count{model="m",sign="under"}'
    assert counted(one, name) == 1


def test_response_body_without_usage_is_not_read(closing: list[Service]) -> None:
    one = service(USAGE)
    closing.append(one)
    exchange, _ = placed(one)
    (answer,) = answers(exchange, response_head(200, {"content-type": "text/html"}))
    assert not answer.HasField("mode_override")
    answers(exchange, response(b'{"cached_tokens": 2}'))
    exchange.close()
    assert counted(one, 'kvsteer_reported_cached_tokens_total{model="m"}') == 0


def test_stream_closed_during_the_pick_holds_no_load(
    closing: list[Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = service(HEADERS)
    closing.append(one)
    exchange = one.open()
    answers(exchange, head("/v1/completions"))

    def routed() -> None:
        assert in_flight(one) == 1
        exchange.close()

    books(one).routed = routed
    answers(exchange, body(PROMPT))
    assert in_flight(one) == 0
    assert counted(one, "kvsteer_open_streams") == 0


def hinted(message: ProcessingRequest, endpoints: str) -> ProcessingRequest:
    fields = {"x-gateway-destination-endpoint-subset": endpoints}
    ParseDict(fields, message.metadata_context.filter_metadata["envoy.lb.subset_hint"])
    return message


def test_request_without_an_eligible_worker_gets_503_in_duplex_only(
    closing: list[Service],
) -> None:
    one = service()
    closing.append(one)
    nobody = "10.9.9.9:9"
    exchange = one.open()
    answers(exchange, hinted(head("/v1/completions"), nobody))
    (answer,) = answers(exchange, body(PROMPT))
    removed = answer.request_body.response.header_mutation.remove_headers
    assert list(removed) == list(owned_headers(one.config))
    exchange.close()
    exchange = one.open()
    answers(exchange, hinted(head("/v1/completions", mode=4), nobody))
    (answer,) = answers(exchange, body(PROMPT))
    assert answer.immediate_response.status.code == 503
    exchange.close()
    assert released(one) == 0


@pytest.mark.parametrize("mode", [ProcessingMode.BUFFERED, ProcessingMode.FULL_DUPLEX_STREAMED])
@pytest.mark.parametrize(("path", "method"), [("/v1/models", "GET"), ("/api/things", "POST")])
def test_request_that_calls_no_model_holds_no_load_and_is_not_observed(
    mode: int, path: str, method: str, closing: list[Service]
) -> None:
    one = service(HEADERS)
    closing.append(one)
    shown = seen(one).decisions
    exchange = one.open()
    client = {"x-gateway-destination-endpoint": SECOND}
    (answer,) = answers(exchange, head(path, method=method, mode=mode, headers=client))
    mutation = answer.request_headers.response.header_mutation
    if mode == ProcessingMode.BUFFERED:
        assert list(mutation.remove_headers) == list(owned_headers(one.config))
        assert not mutation.set_headers
        assert not answer.HasField("dynamic_metadata")
    else:  # the protocol demands an endpoint
        assert mutation.set_headers[0].header.raw_value.decode() in {FIRST, SECOND}
    assert (in_flight(one), shown) == (0, [])
    assert answers(exchange, told(200, FIRST))
    exchange.close()
    assert counted(one, 'kvsteer_decisions_total{model="",reason="not_inference"}') == 1
    assert counted(one, 'kvsteer_responses_total{status="2xx",worker=""}') == 0


def test_unknown_model_removes_the_model_header(closing: list[Service]) -> None:
    config = "models: [{name: m}, {name: n}]\nworkers: [{endpoint: '10.0.0.1:1', model: m}]"
    one = of(config)
    closing.append(one)
    (answer,) = answers(one.open(), head("/v1/models", method="GET"))
    removed = list(answer.request_headers.response.header_mutation.remove_headers)
    assert removed[:2] == ["x-gateway-destination-endpoint", "x-kvsteer-model"]
    (answer,) = answers(one.open(), head("/v1/rerank"))
    assert list(answer.request_headers.response.header_mutation.remove_headers) == removed


@pytest.mark.parametrize(("extra", "count"), [("", 3), ("policy: {endpoints: 1}", 1)])
def test_buffered_dialect_names_as_many_endpoints_as_configured(
    extra: str, count: int, closing: list[Service]
) -> None:
    one = service(extra, FIRST, SECOND, "10.0.0.3:1", "10.0.0.4:1")
    closing.append(one)
    exchange = one.open()
    answers(exchange, head("/v1/completions"))
    (answer,) = answers(exchange, body(PROMPT))
    value = answer.request_body.response.header_mutation.set_headers[0].header.raw_value
    assert len(value.split(b",")) == count
    exchange.close()


def test_dialect_may_be_configured_for_proxies_that_name_no_mode(closing: list[Service]) -> None:
    one = service("extproc: {dialect: epp}")
    closing.append(one)
    exchange = one.open()
    assert answers(exchange, head("/v1/completions", mode=None)) == []
    kinds = [each.WhichOneof("response") for each in answers(exchange, body(PROMPT))]
    assert kinds == ["request_headers", "request_body"]
    exchange.close()


def test_shed_request_is_answered_with_429(closing: list[Service]) -> None:
    one = service("policy: {max_in_flight: 1, shed: true}", FIRST)
    closing.append(one)
    first, _ = placed(one)
    exchange = one.open()
    answers(exchange, head("/v1/completions"))
    (answer,) = answers(exchange, body(PROMPT))
    assert answer.immediate_response.status.code == 429
    for each in (first, exchange):
        each.close()
    assert in_flight(one) == 0


def test_accounting_fault_stops_no_response(
    closing: list[Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = service(HEADERS)
    closing.append(one)
    exchange, _ = placed(one)

    books(one).fails = "note_answer_elsewhere"
    (answer,) = answers(exchange, told(200, "10.9.9.9:9"))
    assert answer.HasField("response_headers")
    exchange.close()
    assert in_flight(one) == 0


SPLIT = """models: [{name: m}]
workers:
- {endpoint: "10.0.0.1:1", role: decode}
- {endpoint: "10.0.0.2:1", role: prefill}
disaggregation: {mode: %s, connector: %s, min_uncached_tokens: 100}
"""
PREFILLER = "x-prefiller-host-port"


def asked_of(one: Service, content: bytes) -> tuple[Exchange, dict[str, str], ProcessingResponse]:
    """A stream whose request was placed, the headers set for it, and the answer."""
    exchange = one.open()
    sent = {PREFILLER: "10.9.9.9:1"}
    answers(exchange, head("/v1/completions", headers=sent))
    answer = answers(exchange, body(content))[0]
    mutation = answer.request_body.response.header_mutation
    said = {each.header.key: each.header.raw_value.decode() for each in mutation.set_headers}
    assert (PREFILLER in said) is (PREFILLER not in mutation.remove_headers)
    return exchange, said, answer


def test_prefill_header_comes_from_the_router_and_never_from_the_client(
    closing: list[Service],
) -> None:
    one = of(SPLIT % ("header", "nixl"))
    closing.append(one)
    first, said, answer = asked_of(one, PROMPT)
    assert PREFILLER not in said  # the decode worker is idle
    for _ in range(8):
        fleet(one).loads.begin(FIRST, 0.0, fleet(one).monotonic())
    other = json.dumps({"model": "m", "prompt": list(range(600, 1500))}).encode()
    exchange, said, answer = asked_of(one, other)
    assert said[PREFILLER] == SECOND
    assert said["x-gateway-destination-endpoint"] == FIRST
    assert not answer.request_body.response.HasField("body_mutation")
    assert one.router.in_flight(SECOND) == 1
    exchange.close()
    first.close()
    assert one.router.in_flight(SECOND) == 0


def busy(one: Service) -> None:
    """Has the first worker answer eight requests."""
    for _ in range(8):
        fleet(one).loads.begin(FIRST, 0.0, fleet(one).monotonic())


def test_mirrored_request_names_the_prefill_worker_in_body_and_header(
    closing: list[Service],
) -> None:
    one = of(SPLIT % ("mirror", "offloading"))
    closing.append(one)
    busy(one)
    _, said, answer = asked_of(one, PROMPT)
    assert (said[PREFILLER], said["x-kvsteer-prefill-cluster"]) == (SECOND, "prefill")
    sent = answer.request_body.response.body_mutation.body
    assert said["content-length"] == str(len(sent))
    source = json.loads(sent)["kv_transfer_params"]["remote_prefiller"]
    assert (source["remote_host"], source["remote_port"]) == ("10.0.0.2", 8998)
    cut, _, tail = said["x-kvsteer-prefill-tail"].partition(":")
    second = json.loads(sent[: -int(cut)] + tail.encode())
    partner = second["kv_transfer_params"]["remote_decoder"]
    assert partner["kv_request_id"] == source["kv_request_id"]


def test_rooms_are_unique(closing: list[Service]) -> None:
    one = of(SPLIT % ("mirror", "sglang"))
    closing.append(one)
    rooms = set()
    for _ in range(20):
        exchange, _, answer = asked_of(one, PROMPT)
        sent = json.loads(answer.request_body.response.body_mutation.body)
        rooms.add(sent["bootstrap_room"])
        exchange.close()
    assert len(rooms) == 20
    assert max(rooms) > 2**40


def test_client_transfer_fields_are_removed_from_an_unsplit_request(closing: list[Service]) -> None:
    one = of(SPLIT % ("mirror", "offloading"))
    closing.append(one)
    theirs = {"model": "m", "prompt": [1, 2], "kv_transfer_params": {"remote_host": "10.9.9.9"}}
    _, said, answer = asked_of(one, json.dumps(theirs).encode())
    assert "x-kvsteer-prefill-cluster" not in said
    sent = answer.request_body.response.body_mutation.body
    assert json.loads(sent) == {"model": "m", "prompt": [1, 2]}


def test_body_that_may_hide_transfer_fields_is_refused(
    closing: list[Service],
) -> None:
    one = of(SPLIT % ("mirror", "offloading"))
    closing.append(one)
    hiding = b'{"kv_transfer_params": 1'
    for content, is_refused in ((hiding, True), (b"{", False)):
        exchange = one.open()
        answers(exchange, head("/v1/completions"))
        answer = answers(exchange, body(content))[0]
        assert answer.HasField("immediate_response") is is_refused
        if is_refused:
            assert answer.immediate_response.status.code == 400
        exchange.close()
    assert counted(one, 'kvsteer_bodies_refused_total{reason="no_object"}') == 1


def test_refused_grpc_body_is_answered_as_clients_of_grpc_read_it(closing: list[Service]) -> None:
    one = of(SPLIT % ("mirror", "offloading"))
    closing.append(one)
    exchange = one.open()
    answers(exchange, head("/vllm.grpc.engine.VllmEngine/Generate"))
    (answer,) = answers(exchange, body(b"\x01\0\0\0\x01a"))  # compressed
    refusal = answer.immediate_response
    headers = {
        each.header.key: each.header.raw_value.decode() for each in refusal.headers.set_headers
    }
    assert (refusal.status.code, refusal.body) == (200, b"")
    assert (headers["content-type"], headers["grpc-status"]) == ("application/grpc", "3")
    assert "uncompressed" in headers["grpc-message"]
    exchange.close()


@pytest.mark.parametrize("padding", [0, 200_000])
@pytest.mark.parametrize("mode", ["mirror", "header"])
async def test_client_transfer_fields_are_removed_at_any_size_in_every_mode(
    mode: str, padding: int, closing: list[Service]
) -> None:
    one = of(SPLIT % (mode, "offloading"))
    closing.append(one)
    exchange = one.open()
    await exchange.receive(read(head("/v1/completions")))
    rest = b'"model": "m", "prompt": [1, 2], "user": "%b"' % (b"a" * padding)
    changed = read(body(b'{"kv\\u005ftransfer_params": {"a": NaN}, %b}' % rest))
    (answer,) = answers_of(await exchange.receive(changed))
    common = answer.request_body.response
    assert common.body_mutation.body == b"{ %b}" % rest
    lengths = [
        each.header.raw_value
        for each in common.header_mutation.set_headers
        if each.header.key == "content-length"
    ]
    assert lengths == [str(len(common.body_mutation.body)).encode()]
    exchange.close()


def test_duplex_request_has_one_leg(closing: list[Service]) -> None:
    one = of(SPLIT % ("mirror", "offloading"))
    closing.append(one)
    busy(one)
    exchange = one.open()
    answers(exchange, head("/v1/completions", mode=4))
    first, *rest = answers(exchange, body(PROMPT))
    mutation = first.request_headers.response.header_mutation
    assert "x-kvsteer-prefill-cluster" in mutation.remove_headers
    echoed = rest[0].request_body.response.body_mutation.streamed_response.body
    assert echoed == PROMPT


def test_request_without_a_body_gets_no_body_mutation(closing: list[Service]) -> None:
    one = of(SPLIT % ("mirror", "offloading"))
    closing.append(one)
    exchange = one.open()
    (answer,) = answers(exchange, head("/v1/models", method="GET", end_of_stream=True))
    assert not answer.request_headers.response.HasField("body_mutation")


def unsteered(one: Service, mode: int = ProcessingMode.BUFFERED) -> tuple[Exchange, str]:
    """A stream whose request is not steered, and the endpoint that is named anyway."""
    exchange = one.open()
    answers(exchange, head("/v1/completions", mode=mode))
    answer = answers(exchange, body(PROMPT))[0]
    part = answer.request_headers if mode == 4 else answer.request_body
    mutation = part.response.header_mutation
    assert bool(mutation.set_headers) == answer.HasField("dynamic_metadata") == (mode == 4)
    if mode != 4:
        assert "x-gateway-destination-endpoint" in mutation.remove_headers
        return exchange, ""
    return exchange, mutation.set_headers[0].header.raw_value.decode()


NOTHING_STEERED = "steering: {percent: 0}"


def test_unsteered_request_is_booked_where_it_is_served(closing: list[Service]) -> None:
    one = service(NOTHING_STEERED)
    closing.append(one)
    exchange, _ = unsteered(one)
    (decision,) = seen(one).decisions
    assert (decision.is_steered, bool(decision.pick), in_flight(one)) == (False, True, 0)
    answers(exchange, told_by_attribute(SECOND))
    assert (one.router.in_flight(FIRST), one.router.in_flight(SECOND)) == (0, 1)
    again, _ = unsteered(one)  # its prompt is expected there from now on
    expected = {
        name: claims.approximate for name, claims in seen(one).decisions[1].basis.claims.items()
    }
    assert list(expected) == [SECOND]
    for each in (exchange, again):
        each.close()
    assert (in_flight(one), released(one)) == (0, 2)
    assert counted(one, f'kvsteer_responses_total{{status="2xx",worker="{SECOND}"}}') == 1
    assert counted(one, 'kvsteer_answered_elsewhere_total{model="m"}') == 0
    assert counted(one, f'kvsteer_served_known_total{{worker="{FIRST}"}}') == 0
    assert counted(one, 'kvsteer_unsteered_total{model="m"}') == 2
    assert not fleet(one).upstreams.has_suspects


def test_unsteered_request_is_booked_with_its_uncached_tokens(
    closing: list[Service],
) -> None:
    one = service(f"{NOTHING_STEERED}\npolicy: {{name: random}}")
    closing.append(one)
    first, _ = unsteered(one)
    answers(first, told_by_attribute(SECOND))
    work = fleet(one).states.load(SECOND).backlog_tokens
    second, third = unsteered(one)[0], unsteered(one)[0]
    answers(second, told_by_attribute(SECOND))  # it has computed the same prompt
    assert fleet(one).states.load(SECOND).backlog_tokens < 1.5 * work
    answers(third, told_by_attribute(FIRST))
    assert fleet(one).states.load(FIRST).backlog_tokens > 0.5 * work
    for each in (first, second, third):
        each.close()


@pytest.mark.parametrize("served", ["10.9.9.9:9", ""])
def test_unsteered_request_is_not_booked_on_an_endpoint_outside_the_fleet(
    served: str, closing: list[Service]
) -> None:
    one = service(NOTHING_STEERED)
    closing.append(one)
    exchange, _ = unsteered(one)
    answers(exchange, told(503, served))
    assert in_flight(one) == 0
    exchange.close()
    assert counted(one, 'kvsteer_responses_total{status="503",worker=""}') == 1


def test_unsteered_request_is_booked_at_the_named_endpoint_in_duplex(
    closing: list[Service],
) -> None:
    one = service(NOTHING_STEERED)
    closing.append(one)
    exchange, named = unsteered(one, ProcessingMode.FULL_DUPLEX_STREAMED)
    other = SECOND if named == FIRST else FIRST
    assert (one.router.in_flight(named), one.router.in_flight(other)) == (1, 0)
    answers(exchange, told(200, other))
    assert (one.router.in_flight(named), one.router.in_flight(other)) == (0, 1)
    exchange.close()
    assert (in_flight(one), released(one)) == (0, 1)


def test_unsteered_request_is_never_refused_where_the_proxy_can_choose(
    closing: list[Service],
) -> None:
    limits = "policy: {max_in_flight: 1, shed: true}"
    one = service(limits)
    closing.append(one)
    full = [placed(one)[0] for _ in range(2)]
    one.router.steering.change(0)
    exchange, _ = unsteered(one)
    for each in (*full, exchange):
        each.close()


def test_partial_steering_reads_the_headers_of_every_response(closing: list[Service]) -> None:
    one = service("steering: {percent: 50}")
    closing.append(one)
    for path, content in (("/v1/completions", ""), ("/v1/completions", "x"), ("/v1/models", "")):
        exchange = one.open()
        (answer,) = answers(exchange, head(path, end_of_stream=not content))
        shown = answer.mode_override.response_header_mode == ProcessingMode.SEND
        assert shown is (path == "/v1/completions")
        exchange.close()


@pytest.mark.parametrize("mode", [4, ProcessingMode.BUFFERED])
@pytest.mark.parametrize("drained", [(), (FIRST, SECOND)])
def test_refused_request_ends_as_one_that_was_not_placed(
    closing: list[Service], drained: tuple[str, ...], mode: int
) -> None:
    one = service()
    closing.append(one)
    for name in drained:
        assert fleet(one).drain(name, draining=True)
    exchange = one.open()
    answers(exchange, head("/v1/completions", mode=mode))
    (answer, *_) = answers(exchange, body(PROMPT))
    exchange.close()
    is_refused = answer.HasField("immediate_response")
    assert is_refused == (bool(drained) and mode == 4)
    assert seen(one).ends == [not is_refused]


class Refusing(Feature):
    def write(self, decision: Decision, path: str, body: Body | None) -> Refusal:
        return crowded_out(path)


def test_request_that_a_feature_refuses_is_no_load(closing: list[Service]) -> None:
    one = service()
    closing.append(one)
    one.hooks.write = [Refusing().write]
    exchange = one.open()
    answers(exchange, head("/v1/completions"))
    (answer,) = answers(exchange, body(PROMPT))
    assert answer.immediate_response.status.code == 429
    assert (in_flight(one), len(one.router.ledger.claims)) == (0, 0)
    exchange.close()
    assert (released(one), seen(one).ends) == (1, [False])


class Extending(Feature):
    """Adds a member, in whose place `write` would write another one."""

    def extend(self, decision: Decision, path: str) -> bytes:
        return b'"added":1'

    def write(self, decision: Decision, path: str, body: Body | None) -> Written:
        return NOTHING_WRITTEN if body is None else Written(body=with_fields(body, {"more": 2}))


class Failing(Feature):
    def extend(self, decision: Decision, path: str) -> bytes:
        raise RuntimeError(path)


@pytest.mark.parametrize("mode", [ProcessingMode.BUFFERED, ProcessingMode.FULL_DUPLEX_STREAMED])
def test_feature_extends_bodies_of_both_dialects_and_writes_only_in_one(
    closing: list[Service], mode: int
) -> None:
    one = service()
    closing.append(one)
    one.hooks = Hooks([Failing(), Extending(), Feature()])
    exchange = one.open()
    answers(exchange, head("/v1/completions", mode=mode))
    *_, answer = answers(exchange, body(PROMPT))
    mutation = answer.request_body.response.body_mutation
    is_duplex = mode != ProcessingMode.BUFFERED
    new = mutation.streamed_response.body if is_duplex else mutation.body
    added = {"added": 1} if is_duplex else {"added": 1, "more": 2}
    assert json.loads(new) == json.loads(PROMPT) | added
    exchange.close()


def test_body_that_is_no_object_is_not_extended(closing: list[Service]) -> None:
    one = service()
    closing.append(one)
    one.hooks = Hooks([Extending()])
    exchange = one.open()
    answers(exchange, head("/v1/completions"))
    (answer,) = answers(exchange, body(b"[1]"))
    assert not answer.request_body.response.HasField("body_mutation")
    exchange.close()


class Telling(Feature):
    """Tells the client where its request went."""

    def respond(self, decision: Decision) -> list[tuple[str, str]]:
        return [("x-went-to", decision.worker)]


class Silent(Feature):
    def respond(self, decision: Decision) -> list[tuple[str, str]]:
        raise RuntimeError(decision.worker)


def test_features_add_headers_to_responses(closing: list[Service]) -> None:
    one = service(HEADERS)
    closing.append(one)
    one.hooks = Hooks([Silent(), Telling(), Feature()])
    exchange, pick = placed(one)
    (answer,) = answers(exchange, told(200))
    (added,) = answer.response_headers.response.header_mutation.set_headers
    assert (added.header.key, added.header.raw_value) == ("x-went-to", pick.encode())
    exchange.close()


def test_response_to_a_request_that_was_not_placed_gets_no_headers(closing: list[Service]) -> None:
    one = service(HEADERS)
    closing.append(one)
    one.hooks = Hooks([Telling()])
    exchange = one.open()
    (answer,) = answers(exchange, told(200))
    assert not answer.response_headers.HasField("response")
    exchange.close()


def test_feature_reads_headers_of_requests_as_they_begin(closing: list[Service]) -> None:
    one = service("misses: {enabled: true}")
    closing.append(one)
    seen: list[RoutingRequest] = []
    one.hooks.begin = [lambda request, *_: seen.append(request)]
    exchange = one.open()
    told_by = head("/v1/completions", headers={"user-agent": "agent/1"}).SerializeToString()
    at_once(exchange.receive(one.decoder.decode(told_by)))
    answers(exchange, body(PROMPT))
    assert [request.named["user-agent"] for request in seen] == [[b"agent/1"]]
    exchange.close()


class FailingLedger:
    """A placing that decides and then fails to book what it decided."""

    def __init__(self, inner: Ledger) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        if name in {"book", "note"}:
            raise RuntimeError("nobody thought of this")
        return getattr(self._inner, name)


def test_decision_whose_booking_fails_ends_unplaced(
    closing: list[Service], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = service()
    closing.append(one)
    books(one).ledger = cast("Ledger", FailingLedger(one.router.ledger))
    exchange = one.open()
    answers(exchange, head("/v1/completions"))
    with pytest.raises(RuntimeError):
        answers(exchange, body(PROMPT))
    exchange.close()
    assert (len(seen(one).decisions), seen(one).ends) == (1, [False])


def posted(one: Service, path: str, content: bytes, status: int = 200) -> Exchange:
    """A stream whose response has been read."""
    exchange = one.open()
    answers(exchange, head(path))
    answers(exchange, told(status))
    for at in range(0, len(content), 7):
        answers(exchange, response(content[at : at + 7]))
    exchange.close()
    return exchange


REPORT = b'{"usage": {"prompt_tokens": 3}}'


def adds_load(one: Service, path: str) -> bool:
    """Whether a POST of this path is load of a worker."""
    exchange = one.open()
    answers(exchange, head(path))
    is_load = in_flight(one) == 1
    exchange.close()
    return is_load


def test_unknown_path_adds_load_after_a_response_with_usage(
    closing: list[Service],
) -> None:
    one = service(USAGE)
    closing.append(one)
    assert not adds_load(one, "/v9/think")
    posted(one, "/v9/think", REPORT)
    assert adds_load(one, "/v9/%74hink")


@pytest.mark.parametrize(
    ("path", "content", "status"),
    [
        ("/v9/think", b'{"tools": [{"usage": {"prompt_tokens": 3}}]}', 200),
        ("/v9/think", REPORT, 500),
        ("/v9/think" * 20, REPORT, 200),
        ("/v1/messages/count_tokens", REPORT, 200),
        ("/v1/responses/resp_1/cancel", REPORT, 200),
    ],
)
def test_unknown_path_adds_no_load_after_a_response_without_usage(
    path: str, content: bytes, status: int, closing: list[Service]
) -> None:
    one = service(USAGE)
    closing.append(one)
    posted(one, path, content, status)
    assert not adds_load(one, path)


def test_unknown_path_is_not_learned_where_responses_are_not_read(closing: list[Service]) -> None:
    one = service("accounting: {responses: headers}")
    closing.append(one)
    posted(one, "/v9/think", REPORT)
    assert not adds_load(one, "/v9/think")


@pytest.mark.parametrize("path", ["/invocations", "/v1/chat/completions/batch"])
def test_reserved_fields_are_removed_from_bodies_without_keys(
    path: str, closing: list[Service]
) -> None:
    one = of(SPLIT % ("header", "offloading"))
    closing.append(one)
    exchange = one.open()
    answers(exchange, head(path))
    (answer,) = answers(exchange, body(b'{"model": "m", "kv_transfer_params": {}}'))
    assert answer.request_body.response.body_mutation.body == b'{"model": "m"}'
    assert in_flight(one) == 1
    exchange.close()


RESPONSES = "/v1/responses"
KEPT = b'{"id": "resp_1", "object": "response", "max_output_tokens": null}'
CONTINUES = json.dumps({"model": "m", "input": "go on", "previous_response_id": "resp_1"}).encode()


def continued(one: Service) -> str:
    """What decides on a request that continues a response."""
    exchange = one.open()
    answers(exchange, head(RESPONSES))
    answers(exchange, body(CONTINUES))
    exchange.close()
    return seen(one).decisions[-1].basis.belonging.sole


@pytest.mark.parametrize(
    ("settings", "path", "status", "kept"),
    [
        (USAGE, RESPONSES, 200, True),
        (USAGE, RESPONSES, 500, False),
        (USAGE, "/v1/completions", 200, False),
        (HEADERS, RESPONSES, 200, False),
    ],
)
def test_response_is_continued_by_the_worker_that_gave_it(
    closing: list[Service], settings: str, path: str, status: int, *, kept: bool
) -> None:
    one = service(settings)
    closing.append(one)
    exchange = one.open()
    answers(exchange, head(path))
    answers(exchange, body(PROMPT))
    answers(exchange, told(status, SECOND))
    answers(exchange, response(KEPT[:20]))
    last = ProcessingRequest(response_body=HttpBody(body=KEPT[20:], end_of_stream=True))
    answers(exchange, last)
    exchange.close()
    assert continued(one) == (SECOND if kept else "")


def test_exchange_is_held_from_when_it_asks_for_time_to_its_end(closing: list[Service]) -> None:
    one = service()
    closing.append(one)
    exchange = one.open()
    answers(exchange, head("/v1/completions"))
    assert not exchange.more_time(9.0)
    request = exchange.step(read(body(PROMPT)))
    assert isinstance(request, RoutingRequest)
    held = [exchange.is_held]
    assert answers_of(exchange.more_time(9.0))[0].override_message_timeout.seconds == 9
    held.append(exchange.is_held)
    at_once(exchange.decide(request))
    assert [*held, exchange.is_held] == [False, True, False]
    assert not exchange.more_time(9.0)
    exchange.close()
    assert in_flight(one) == 0
