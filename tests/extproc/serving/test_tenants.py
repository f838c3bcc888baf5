"""Streams of tenants that are kept apart: each gets its salt, or is refused."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from extproc.base.errors import StartError
from extproc.pb.kvsteer_ext_proc_pb2 import HeaderValue, ProcessingMode, ProcessingResponse
from extproc.requests.tenant_salt import PATHS, SaltMaker
from extproc.serving.exchange import Service
from extproc.serving.preparation import INLINE_BYTES
from tests.extproc.messages import answers_of, body, head
from tests.extproc.serving.routers import counted, in_flight, of, seen, service

SECRET = b"0123456789abcdef"
COMPLETIONS = "/v1/completions"
VLLM = ", engine: {name: vllm, version: '0.32.0'}"
SGLANG = ", engine: {name: sglang, version: '0.5.23'}"


class Apart:
    """Makes routers that keep tenants apart, and asks them."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "secret"
        self._file.write_bytes(SECRET)
        self.services: list[Service] = []

    def serve(self, rules: str = "", extra: str = "") -> Service:
        rules = f"header: X-Tenant, secret_file: '{self._file}'{rules}"
        self.services.append(service(f"isolation: {{{rules}}}\n{extra}"))
        return self.services[-1]

    def serve_all(self, fleet: str) -> Service:
        """Serves these models and workers."""
        rules = f"header: X-Tenant, secret_file: '{self._file}'"
        self.services.append(of(f"{fleet}isolation: {{{rules}}}\n"))
        return self.services[-1]


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[Apart]:
    made = Apart(tmp_path)
    yield made
    for one in made.services:
        one.router.close()


async def asked(
    one: Service,
    content: bytes,
    *tenants: str,
    path: str = COMPLETIONS,
    method: str = "POST",
    mode: int = ProcessingMode.BUFFERED,
) -> ProcessingResponse:
    """The first answer that settles a request, to its headers or to its body."""
    exchange = one.open()
    first = head(path, mode=mode, method=method, headers={"content-length": str(len(content))})
    for tenant in tenants:
        first.request_headers.headers.headers.append(
            HeaderValue(key="x-tenant", raw_value=tenant.encode())
        )
    read = one.decoder.decode
    answers = answers_of(await exchange.receive(read(first.SerializeToString())))
    answers = [each for each in answers if settles(each)]
    if not answers:
        answers = answers_of(await exchange.receive(read(body(content).SerializeToString())))
    exchange.close()
    return answers[0]


def settles(answer: ProcessingResponse) -> bool:
    placed = answer.request_headers.response.HasField("header_mutation")
    return placed or answer.HasField("immediate_response")


def sent(answer: ProcessingResponse) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer.request_body.response.body_mutation.body)
    return found


def prompt(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "prompt": [*range(512)], **fields}).encode()


def many(name: str, **fields: Any) -> bytes:
    """A body with more members of a name than are looked at."""
    return b"{%b%b" % (b'"%b":"x",' % name.encode() * 65, prompt(**fields)[1:])


def worker(number: int, model: str, engine: str = "") -> str:
    """A worker's entry in the configuration. engine: what it is told to run, if that is known."""
    return f"{{endpoint: 'a:{number}', model: {model}{engine}}}"


async def test_tenants_get_salts_of_their_own_and_keys_with_them(apart: Apart) -> None:
    one = apart.serve()
    salts = [sent(await asked(one, prompt(), name))["cache_salt"] for name in ("a", "b", "a")]
    assert salts[0] == salts[2] != salts[1]
    assert salts[0] == SaltMaker(SECRET).salt(b"a", None)
    keys = [decision.marks for decision in seen(one).decisions]
    assert keys[0] == keys[2] != keys[1]
    assert counted(one, 'kvsteer_isolated_requests_total{outcome="salted"}') == 3


async def test_tenant_does_not_find_what_another_one_sent(apart: Apart) -> None:
    one = apart.serve()
    for name in ("a", "b", "a"):
        await asked(one, prompt(), name)
    first, other, again = (decision.uncached_tokens for decision in seen(one).decisions)
    assert first == other > again


async def test_prompt_that_is_known_by_its_text_is_found_only_by_its_tenant(apart: Apart) -> None:
    one = apart.serve()
    text = json.dumps({"model": "m", "prompt": "word " * 2_000}).encode()
    for name in ("a", "b", "a"):
        await asked(one, text, name)
    first, other, again = (decision.uncached_tokens for decision in seen(one).decisions)
    assert first == other > again


@pytest.mark.parametrize(
    ("tenants", "rules", "outcome", "status"),
    [
        ((), "", "no_tenant", 403),
        (("",), "", "no_tenant", 403),
        (("a", "b"), "", "several_tenants", 403),
        (("a", "a"), "", "salted", 0),
        ((), ", without_tenant: common", "common", 0),
        (("a", "b"), ", without_tenant: common", "several_tenants", 403),
    ],
)
async def test_request_without_one_tenant_is_treated_as_configured(
    apart: Apart, tenants: tuple[str, ...], rules: str, outcome: str, status: int
) -> None:
    one = apart.serve(rules)
    answer = await asked(one, prompt(), *tenants)
    assert answer.immediate_response.status.code == status
    assert counted(one, f'kvsteer_isolated_requests_total{{outcome="{outcome}"}}') == 1
    assert in_flight(one) == 0


@pytest.mark.parametrize(
    ("content", "path", "outcome", "status"),
    [
        (b"[]", COMPLETIONS, "body", 400),
        (b"\x1f\x8b", COMPLETIONS, "body", 400),
        (prompt(), "/generate", "api", 403),
        (prompt(), "/v1/score", "api", 403),
        (prompt(), "/v1/of/a/newer/engine", "api", 403),
        (prompt(), "/v1/audio/transcriptions", "api", 403),
        (b"\0\0\0\0\0", "/vllm.grpc.engine.VllmEngine/Generate", "api", 200),
        (prompt(previous_response_id="resp_1"), "/v1/responses", "response", 404),
        (b"", "/v1/responses/resp_1/cancel", "response", 404),
        (b"", "/x/v1/responses/resp_1/cancel", "response", 404),
        (prompt(messages=[{"uuid": "u"}]), COMPLETIONS, "media", 400),
        (many("request_id", previous_response_id="resp_1"), "/v1/responses", "body", 400),
        (many("previous_response_id"), "/v1/responses", "body", 400),
        (many("cache_salt"), COMPLETIONS, "body", 400),
        (many("model"), COMPLETIONS, "body", 400),
        (prompt(), "/v1/responses//", "api", 403),
        (prompt(), "/v1/responses//resp_1", "api", 403),
        (prompt(), "//v1/chat/completions", "api", 403),
    ],
)
async def test_request_that_cannot_be_salted_is_refused(
    apart: Apart, content: bytes, path: str, outcome: str, status: int
) -> None:
    one = apart.serve()
    answer = await asked(one, content, "a", path=path)
    assert answer.immediate_response.status.code == status
    assert counted(one, f'kvsteer_isolated_requests_total{{outcome="{outcome}"}}') == 1


@pytest.mark.parametrize(
    ("path", "content", "is_refused"),
    [
        ("/v1/embeddings", prompt(), True),
        ("/v1/embeddings", prompt(more="x" * INLINE_BYTES), True),
        ("/v1/embeddings", prompt(model="nobody's"), True),
        ("/v1/embeddings", prompt(model="vllms"), False),
        ("/v1/embeddings", prompt(model="unknown"), True),
        ("/v1/messages", prompt(), True),
        ("/v1/messages", prompt(model="vllms"), False),
        (COMPLETIONS, prompt(model="unknown"), False),
        (COMPLETIONS, prompt(), False),
    ],
)
async def test_api_on_which_only_vllm_reads_a_salt_is_refused_unless_workers_are_known_to_run_it(
    apart: Apart, path: str, content: bytes, is_refused: bool
) -> None:
    fleet = [
        worker(1, "m", VLLM),
        worker(2, "m", SGLANG),
        worker(3, "vllms", VLLM),
        worker(4, "vllms"),  # a new one, which is not asked yet
        worker(5, "unknown"),
    ]
    models = "models: [{name: m}, {name: vllms}, {name: unknown}]"
    one = apart.serve_all(f"{models}\nworkers: [{', '.join(fleet)}]\n")
    answer = await asked(one, content, "a", path=path)
    assert answer.HasField("immediate_response") is is_refused
    assert counted(one, 'kvsteer_isolated_requests_total{outcome="api"}') == is_refused


async def test_body_that_is_not_read_is_refused(apart: Apart) -> None:
    one = apart.serve(extra="extproc: {max_body_bytes: 1024}")
    answer = await asked(one, prompt(more="x" * 2_000), "a")
    assert answer.immediate_response.status.code == 413


async def test_body_that_the_proxy_streams_is_refused(apart: Apart) -> None:
    one = apart.serve()
    answer = await asked(one, prompt(), "a", mode=ProcessingMode.FULL_DUPLEX_STREAMED)
    assert answer.immediate_response.status.code == 403


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be", "utf-32"])
async def test_body_in_another_encoding_is_salted_in_utf8(apart: Apart, encoding: str) -> None:
    answer = await asked(apart.serve(), prompt(cache_salt="x").decode().encode(encoding), "a")
    assert sent(answer)["cache_salt"] not in ("x", SaltMaker(SECRET).salt(b"a", None))
    assert sent(answer)["prompt"] == [*range(512)]


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("POST", "/tokenize")])
async def test_request_that_calls_no_model_passes(apart: Apart, method: str, path: str) -> None:
    answer = await asked(apart.serve(), b"{}", path=path, method=method)
    assert not answer.HasField("immediate_response")


async def test_response_of_a_shared_model_is_still_its_tenants_own(apart: Apart) -> None:
    one = apart.serve(", share: [m]")
    found = sent(await asked(one, prompt(cache_salt="own"), "a", path="/v1/responses"))
    assert found["cache_salt"] == "own"
    path = f"/v1/responses/{found['request_id']}"
    for tenant, is_refused in (("a", False), ("b", True)):
        answer = await asked(one, b"", tenant, path=path, method="GET")
        assert answer.HasField("immediate_response") is is_refused


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/score"])
async def test_request_for_a_shared_model_stays_as_it_is(apart: Apart, path: str) -> None:
    one = apart.serve(", share: [m]")
    answer = await asked(one, prompt(cache_salt="own"), "a", path=path)
    assert not answer.HasField("immediate_response")
    assert not answer.request_body.response.body_mutation.body
    assert counted(one, 'kvsteer_isolated_requests_total{outcome="shared"}') == 1


@pytest.mark.parametrize(
    "model",
    [
        b'"model":"m","model":"private"',
        b'"model":"m","mod\\u0065l":"private"',
        b'"a":{"model":"m"},"model":"private"',
        b'"model":["m"]',
        b'"model":"M"',
        b'"model":"m "',
    ],
)
async def test_request_that_only_seems_to_be_for_a_shared_model_is_salted(
    apart: Apart, model: bytes
) -> None:
    one = apart.serve(", share: [m]")
    answer = await asked(one, b'{%b,"prompt":[1]}' % model, "a")
    assert sent(answer)["cache_salt"] == SaltMaker(SECRET).salt(b"a", None)


@pytest.mark.parametrize("path", sorted(PATHS))
async def test_long_body_is_salted_on_every_path(apart: Apart, path: str) -> None:
    one = apart.serve_all(f"models: [{{name: m}}]\nworkers: [{worker(1, 'm', VLLM)}]\n")
    answer = await asked(one, prompt(more="x" * INLINE_BYTES), "a", path=path)
    assert len(sent(answer)["cache_salt"]) == 32


async def test_request_that_is_not_steered_is_salted_all_the_same(apart: Apart) -> None:
    answer = await asked(apart.serve(extra="steering: {percent: 0}"), prompt(), "a")
    assert "cache_salt" in sent(answer)


@pytest.mark.parametrize(
    "extra", ["", "disaggregation: {mode: header}", "disaggregation: {min_pulled_tokens: 64}"]
)
async def test_client_names_no_place_from_which_blocks_come(apart: Apart, extra: str) -> None:
    one = apart.serve(extra=extra.replace("{min", "{connector: offloading, min"))
    answer = await asked(one, prompt(kv_transfer_params={"remote_host": "10.9.9.9"}), "a")
    assert set(sent(answer)) == {"model", "prompt", "cache_salt"}
    removed = answer.request_body.response.header_mutation.remove_headers
    assert sum(name == "x-kv-cache-source-host-port" for name in removed) == 1


def test_secret_that_cannot_be_read_keeps_the_router_from_starting(tmp_path: Path) -> None:
    file = tmp_path / "none"
    with pytest.raises(StartError, match=r"isolation\.secret_file"):
        service(f"isolation: {{header: x-tenant, secret_file: '{file}'}}")
