import asyncio
import io
import json
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from kvtools.simulator.engine import Latency
from kvtools.simulator.server import SimulatedWorker, running
from kvtools.simulator.settings import Settings
from kvtools.simulator.tokens import ModelTokens
from tests.kvtools.simulator.readers import END, Body, Client, post, replay, socket
from tests.waiting import until

LONG = "The quick brown fox jumps over the lazy dog. " * 8


async def chunks(client: Client, path: str, body: Body) -> list[Body]:
    async with client.post(path, json={**body, "stream": True}) as response:
        assert response.content_type == "text/event-stream"
        lines = [line for line in (await response.text()).split("\n\n") if line]
    assert lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_repeated_prompt_is_cached_but_for_its_last_block(client: Client) -> None:
    first = await post(client, "/v1/completions", {"prompt": LONG, "max_tokens": 4})
    again = await post(client, "/v1/completions", {"prompt": LONG, "max_tokens": 4})
    length = first["usage"]["prompt_tokens"]
    assert first["usage"] == {
        "prompt_tokens": length,
        "completion_tokens": 4,
        "total_tokens": length + 4,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": (length - 1) // 16 * 16}
    assert again["choices"] == first["choices"]


async def test_chat_shows_the_ids_that_it_was_given_unless_they_are_ignored() -> None:
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 1,
        "return_token_ids": True,
        "kv_transfer_params": {"prompt_token_ids": [11, 12, 13]},
    }
    shown = []
    for ignores in (False, True):
        settings = Settings(shows_token_ids=True, ignores_token_ids=ignores)
        async with running(settings) as worker, Client(worker.url) as client:
            answer = await post(client, "/v1/chat/completions", body)
            shown.append(answer["prompt_token_ids"])
    assert shown[0] == [11, 12, 13] != shown[1]


async def test_next_turn_of_a_chat_finds_the_answer_in_the_cache() -> None:
    messages = [{"role": "user", "content": LONG}]
    computed = 0
    async with running(Settings()) as worker, Client(worker.url) as own:
        for _ in range(8):
            answer = await post(own, "/v1/chat/completions", {"messages": messages})
            usage = answer["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == computed // 16 * 16
            computed = usage["total_tokens"] - 1  # nothing needed the last token's KV
            assert answer["choices"][0]["finish_reason"] == "stop"
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "go on"}]


async def test_streamed_answer_equals_the_whole_one(client: Client) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6}
    whole = await post(client, "/v1/chat/completions", body)
    usage = {"stream_options": {"include_usage": True}}
    first, *pieces, last = await chunks(client, "/v1/chat/completions", body | usage)
    assert first["choices"][0]["delta"]["role"] == "assistant"
    text = "".join(piece["choices"][0]["delta"]["content"] for piece in pieces)
    assert text == whole["choices"][0]["message"]["content"]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * 5 + ["length"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 6


@pytest.mark.parametrize(
    ("prompt", "choices"), [("a", 2), (["a", "b"], 4), ([5, 6, 7], 2), ([[5], [6], [7]], 6)]
)
async def test_prompts_of_every_form_get_their_choices(
    client: Client, prompt: object, choices: int
) -> None:
    body = {"prompt": prompt, "n": 2, "max_tokens": 3}
    whole = await post(client, "/v1/completions", body)
    assert [choice["index"] for choice in whole["choices"]] == list(range(choices))
    assert whole["usage"]["completion_tokens"] == choices * 3
    streamed = dict.fromkeys(range(choices), "")
    for chunk in await chunks(client, "/v1/completions", body):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(streamed.values()) == [choice["text"] for choice in whole["choices"]]


async def test_cached_tokens_of_several_answers_are_those_of_the_last(client: Client) -> None:
    body = {"prompt": LONG, "n": 3, "max_tokens": 2}
    usage = (await post(client, "/v1/completions", body))["usage"]
    stored_by_the_first = (usage["prompt_tokens"] - 1) // 16 * 16
    assert usage["prompt_tokens_details"] == {"cached_tokens": stored_by_the_first}


async def test_messages_usage_counts_cached_tokens_beside_the_input(client: Client) -> None:
    body = {"messages": [{"role": "user", "content": LONG}], "system": "be brief", "max_tokens": 2}
    first = (await post(client, "/v1/messages", body))["usage"]
    again = (await post(client, "/v1/messages", body))["usage"]
    assert first["cache_read_input_tokens"] == 0
    cached = (first["input_tokens"] - 1) // 16 * 16
    assert again["cache_read_input_tokens"] == cached
    assert again["input_tokens"] == first["input_tokens"] - cached


async def test_usage_omits_cached_tokens_of_0_for_engines_that_do() -> None:
    async with running(Settings(dialect="sglang-0.5.22")) as worker, Client(worker.url) as own:
        body = {"prompt": LONG, "max_tokens": 1}
        first = await post(own, "/v1/completions", body)
        again = await post(own, "/v1/completions", body)
    assert first["usage"]["prompt_tokens_details"] is None
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("other", [{"cache_salt": "s"}, {"model": "ad-a"}])
async def test_salts_and_adapters_have_caches_of_their_own(client: Client, other: Body) -> None:
    for body, hit in (({}, False), (other, False), (other, True)):
        answer = await post(client, "/v1/completions", {"prompt": LONG, "max_tokens": 1, **body})
        assert (answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == hit


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/v1/completions", b"{", 400, "BadRequestError"),
        ("/v1/completions", b'"\xff"', 400, "BadRequestError"),
        ("/v1/completions", b'{"prompt": 5}', 400, "BadRequestError"),
        ("/v1/completions", b'{"prompt": [1, "a"]}', 400, "BadRequestError"),
        ("/v1/completions", b'{"prompt": [8192]}', 400, "BadRequestError"),
        ("/v1/completions", b'{"prompt": ""}', 400, "BadRequestError"),
        ("/v1/completions", b'{"prompt": "a", "max_tokens": 512}', 400, "BadRequestError"),
        ("/v1/completions", b'{"prompt": "a", "cache_salt": ""}', 400, "BadRequestError"),
        ("/v1/completions", b'{"prompt": [' + b"1," * 600 + b"1]}", 400, "BadRequestError"),
        ("/v1/completions", b'{"prompt": "a", "model": "no"}', 404, "NotFoundError"),
        ("/v1/chat/completions", b'{"messages": []}', 400, "BadRequestError"),
        ("/v1/chat/completions", b'{"messages": [{}]}', 400, "BadRequestError"),
        ("/v1/chat/completions", b'{"messages": [{"a":' + b"[" * 9999, 400, "BadRequestError"),
        ("/tokenize", b"{}", 400, "BadRequestError"),
        ("/nowhere", b"", 404, "NotFound"),
        ("/version", b"", 405, "MethodNotAllowed"),
        ("/tokenize", b" " * (32 * 1024 * 1024 + 1), 413, "RequestEntityTooLarge"),
    ],
)
async def test_bad_request_gets_an_openai_error(
    client: Client, path: str, body: bytes, status: int, kind: str
) -> None:
    async with client.post(path, data=io.BytesIO(body)) as response:
        assert response.status == status
        assert response.headers["x-worker"] == "w"
        error = (await response.json())["error"]
    assert (error["type"], error["code"]) == (kind, status)
    assert error["message"]


async def test_tokenize_returns_the_tokens_of_prompts_and_chats(
    client: Client, tokens: ModelTokens
) -> None:
    text = await post(client, "/tokenize", {"prompt": LONG})
    assert text == {"count": len(text["tokens"]), "max_model_len": 512, "tokens": text["tokens"]}
    assert text["tokens"] == tokens.of_text(LONG)
    messages = [{"role": "user", "content": "hi"}]
    chat = await post(client, "/tokenize", {"messages": messages})
    assert chat["tokens"] == tokens.of_chat(messages)


async def test_operator_routes_show_models_version_health_and_event_sources(
    worker: SimulatedWorker, client: Client
) -> None:
    models = await (await client.get("/v1/models")).json()
    assert [(model["id"], model["parent"]) for model in models["data"]] == [
        ("tiny", None),
        ("ad-a", "tiny"),
    ]
    assert await (await client.get("/version")).json() == {"version": "0.32.0"}
    assert (await client.get("/health")).status == 200
    source = (await (await client.get("/kv_event_sources")).json())["0"]
    assert source["endpoint"] == worker.events_endpoint
    assert source["replay_endpoint"] == worker.replay_endpoint
    assert (source["topic"], source["buffer_steps"]) == ("kv", 4)


async def test_metrics_have_the_names_of_vllm(client: Client) -> None:
    for _ in range(2):
        await post(client, "/v1/completions", {"prompt": list(range(17)), "max_tokens": 1})
    text = await (await client.get("/metrics")).text()
    shown = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    label = '{model_name="tiny"}'
    assert {name.removesuffix(label): float(value) for name, value in shown.items()} == {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "vllm:prefix_cache_queries_total": 34,
        "vllm:prefix_cache_hits_total": 16,
        'vllm:cache_config_info{block_size="16",enable_prefix_caching="True",engine="0",'
        'num_gpu_blocks="1024"}': 1,
    }


async def test_events_reach_a_subscriber(worker: SimulatedWorker, client: Client) -> None:
    async with socket(zmq.SUB, worker.events_endpoint) as sub, asyncio.timeout(60):
        sub.subscribe(b"kv")
        # A subscription has no answer: publish until it has arrived.
        prompt = 100
        while not await sub.poll(20):
            await post(client, "/v1/completions", {"prompt": [prompt] * 17, "max_tokens": 1})
            prompt += 1
        topic, sequence, payload = await sub.recv_multipart()
    timestamp, events, rank = msgspec.msgpack.decode(payload)
    assert (topic, len(sequence), type(timestamp), rank) == (b"kv", 8, float, 0)
    assert [event["type"] for event in events] == ["BlockStored"]


async def test_replay_returns_kept_batches_from_the_requested_sequence(
    worker: SimulatedWorker, client: Client
) -> None:
    for token in range(6):
        await post(client, "/v1/completions", {"prompt": [token] * 16, "max_tokens": 1})
    sequences = [int.from_bytes(frames[2], "big") for frames in await replay(worker, 0)]
    assert sequences == [2, 3, 4, 5]  # the buffer holds four
    assert [frames[:3] for frames in await replay(worker, 5)] == [[b"", b"kv", b"\0" * 7 + b"\5"]]
    assert await replay(worker, 10**6) == []


async def test_replay_request_without_delimiter_gets_no_answer(worker: SimulatedWorker) -> None:
    async with socket(zmq.DEALER, worker.replay_endpoint) as dealer, asyncio.timeout(60):
        await dealer.send(b"\0" * 8)
        await dealer.send_multipart([b"", b"\0" * 8])
        assert await dealer.recv_multipart() == END
        assert not await dealer.poll(0)


async def test_reset_is_announced_with_the_next_step(
    worker: SimulatedWorker, client: Client
) -> None:
    body = {"prompt": [7] * 17, "max_tokens": 1}
    await post(client, "/v1/completions", body)
    assert await post(client, "/reset_prefix_cache", {}) == {"success": True}
    assert len(await replay(worker, 0)) == 1
    await post(client, "/v1/completions", {**body, "session_id": "s"})
    events = msgspec.msgpack.decode((await replay(worker, 1))[0][3])[1]
    assert [event["type"] for event in events] == ["AllBlocksCleared", "BlockStored"]
    assert events[1]["session_id"] == "s"


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_disconnects_frees_its_blocks(*, stream: bool) -> None:
    async with running(Settings(decode_tokens_per_second=50)) as worker, Client(worker.url) as own:
        body = {"prompt": LONG, "max_tokens": 10_000, "stream": stream}
        request = asyncio.create_task(own.post("/v1/completions", json=body).__aenter__())
        await until(lambda: worker.engine.cache_usage > 0)
        assert worker.engine.counters.running == 1
        if stream:
            (await request).close()
        else:
            request.cancel()
        await until(lambda: worker.engine.cache_usage == 0)
        assert worker.engine.counters.in_flight == worker.engine.counters.running == 0


async def test_requests_share_a_cache_too_small_for_all_of_them() -> None:
    settings = Settings(blocks=9, block_size_tokens=4, max_running_requests=3)
    async with running(settings) as worker, Client(worker.url) as own:
        body = {"max_tokens": 20}
        answers = await asyncio.gather(
            *(post(own, "/v1/completions", {"prompt": [token] * 9, **body}) for token in range(6))
        )
        assert {answer["usage"]["completion_tokens"] for answer in answers} == {20}
        assert worker.engine.cache_usage == 0
        assert worker.engine.reset_prefix_cache()


async def test_prefills_queue_and_take_time_by_uncached_tokens() -> None:
    loop = asyncio.get_running_loop()
    settings = Settings(prefill_tokens_per_second=1000)
    bodies = [{"prompt": [token] * 50, "max_tokens": 1} for token in (1, 2)]
    async with running(settings) as worker, Client(worker.url) as own:
        started = loop.time()
        await asyncio.gather(*(post(own, "/v1/completions", body) for body in bodies))
        assert loop.time() - started >= 0.1
    latency = Latency(settings.prefill_tokens_per_second, settings.decode_tokens_per_second)
    assert (latency.prefill_seconds(50), latency.decode_seconds) == (0.05, 0)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
async def test_worker_listens_on_ipv6() -> None:
    settings = Settings(
        listen="[::1]:0", events_endpoint="tcp://[::1]:0", replay_endpoint="tcp://[::1]:0"
    )
    async with running(settings) as worker, Client(worker.url) as own:
        assert worker.endpoint.startswith("[::1]:")
        await post(own, "/v1/completions", {"prompt": LONG, "max_tokens": 1})
        assert len(await replay(worker, 0)) == 1


async def test_worker_without_events_has_no_event_sources() -> None:
    settings = Settings(events_endpoint=None, replay_endpoint=None)
    async with running(settings) as worker, Client(worker.url) as own:
        assert (worker.events_endpoint, worker.replay_endpoint) == (None, None)
        assert await (await own.get("/kv_event_sources")).json() == {}
        response = await own.post("/v1/completions", json={"prompt": LONG})
        assert response.headers["x-worker"] == worker.name == worker.endpoint
