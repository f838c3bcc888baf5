"""Tokens, hashes and frames against the recordings of a real vLLM 0.32.0."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvtools.simulator import publisher
from kvtools.simulator.dialects import DIALECTS
from kvtools.simulator.events import BlockRemoved, BlockStored, Event
from kvtools.simulator.hashing import Adapter, CacheNamespace, VllmHashing, chain_of
from kvtools.simulator.requests import ChatRequest, Completion
from kvtools.simulator.settings import TINY_MODEL
from kvtools.simulator.tokens import ModelTokens, PromptError

Recorded = Callable[[str], list[dict[str, Any]]]


def ids_of(tokens: ModelTokens, record: dict[str, Any]) -> list[int]:
    if record["path"] == "/v1/chat/completions":
        chat = msgspec.convert(record["body"], ChatRequest)
        return tokens.of_chat(chat.messages, tools=chat.tools)
    prompt = msgspec.convert(record["body"], Completion).prompt
    return tokens.of_text(prompt) if isinstance(prompt, str) else list(record["body"]["prompt"])


@pytest.mark.parametrize(
    ("name", "requests"), [("w1", 31), ("w2_lora", 7), ("cached_tokens", 110), ("dp2_rank0", 2)]
)
def test_recorded_prompts_have_the_tokens_of_vllm(
    recorded: Recorded, tokens: ModelTokens, name: str, requests: int
) -> None:
    known = [record for record in recorded(name) if record.get("prompt_token_ids")]
    assert len(known) == requests
    for record in known:
        assert ids_of(tokens, record) == record["prompt_token_ids"], record["scenario"]


@pytest.mark.parametrize("name", ["w1", "cached_tokens"])
def test_recorded_prompts_have_the_hashes_of_vllm(recorded: Recorded, name: str) -> None:
    announced: set[int] = set()
    for record in recorded(name):
        for payload in record["payloads"]:
            for event in msgspec.msgpack.decode(payload)[1]:
                if event["type"] == "BlockStored":
                    announced.update(event["block_hashes"])
        if record["status"] == 200 and record.get("prompt_token_ids"):
            namespace = CacheNamespace(salt=record["body"].get("cache_salt"))
            digests = chain_of(record["prompt_token_ids"], 32, namespace, VllmHashing())
            assert {VllmHashing().wire(digest) for digest in digests} <= announced, record[
                "scenario"
            ]


@pytest.mark.parametrize("name", ["w1", "w2_lora", "cached_tokens", "dp2_rank0", "dp2_rank1"])
def test_recorded_payloads_encode_to_the_same_bytes(recorded: Recorded, name: str) -> None:
    payloads = [payload for record in recorded(name) for payload in record["payloads"]]
    assert payloads
    for payload in payloads:
        timestamp, events, rank = msgspec.msgpack.decode(payload)
        values = [msgspec.convert(event, Event) for event in events]
        written = DIALECTS["vllm-0.32"].layout.encode(values)
        assert publisher.batch(timestamp, written, rank) == payload


def test_adapter_and_salt_are_published_as_vllm_does() -> None:
    namespace = CacheNamespace(Adapter("ad-a", 1), "tenant-A")
    assert namespace.published_keys(first=True) == ("ad-a", "tenant-A")
    assert namespace.published_keys(first=False) == ("ad-a",)
    assert CacheNamespace(salt="tenant-A").published_keys(first=False) is None


def test_adapters_and_salts_do_not_share_blocks() -> None:
    adapter = Adapter("same", 1)
    namespaces = [
        CacheNamespace(),
        CacheNamespace(salt="same"),
        CacheNamespace(adapter),
        CacheNamespace(adapter, "x"),
    ]
    assert len({next(chain_of(range(16), 16, one, VllmHashing())) for one in namespaces}) == 4


def test_optional_fields_are_omitted_and_required_ones_null() -> None:
    events: list[Event] = [
        BlockStored((1,), None, (2,), 1, None, None, None),
        BlockRemoved((1,), None),
    ]
    layout = DIALECTS["vllm-0.32"].layout
    stored, removed = layout.encode(events)
    assert list(stored) == [
        "type",
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
    ]
    assert list(removed) == ["type", "block_hashes", "medium"]


@pytest.mark.parametrize(
    ("request_frames", "start"),
    [
        ([b"", b"\0" * 7 + b"\5"], 5),
        ([b"", b"\0\0\0\7"], 7),
        ([b"\0" * 8], None),
        ([b"", b""], None),
        ([b"", b"\0" * 9], None),
        ([b"x", b"\0" * 8], None),
        ([], None),
    ],
)
def test_replay_request_is_read_or_ignored(request_frames: list[bytes], start: int | None) -> None:
    assert publisher.replay_start(request_frames) == start


def test_text_parts_are_joined_by_line_breaks(tokens: ModelTokens) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    in_parts = tokens.of_chat([{"role": "user", "content": parts}])
    assert in_parts == tokens.of_chat([{"role": "user", "content": "one\ntwo"}])


def with_template(directory: Path, template: str) -> ModelTokens:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY_MODEL / name, directory)
    (directory / "chat_template.jinja").write_text(template)
    return ModelTokens(directory)


def test_template_gets_tools_special_tokens_and_its_own_arguments(tmp_path: Path) -> None:
    template = "{{ eos_token }}{{ tools | tojson }}{{ style }}{{ messages[0].content }}"
    tokens = with_template(tmp_path, template)
    ids = tokens.of_chat(
        [{"role": "user", "content": None}],
        tools=[{"name": "ä<"}],
        template_arguments={"style": "short"},
    )
    assert ids == [2, *tokens.of_text('[{"name": "ä<"}]short')]


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{{ messages + 1 }}"])
def test_template_that_refuses_messages_raises_a_prompt_error(
    tmp_path: Path, template: str
) -> None:
    with pytest.raises(PromptError, match="the chat template refuses these messages"):
        with_template(tmp_path, template).of_chat([{"role": "user", "content": "hi"}])


def test_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        ModelTokens(tmp_path)


@pytest.mark.parametrize(
    "message",
    [{"content": "no role"}, {"role": "user", "content": 5}, {"role": "u", "content": [{}]}],
)
def test_messages_of_unknown_shape_are_refused(
    tokens: ModelTokens, message: dict[str, Any]
) -> None:
    with pytest.raises(PromptError):
        tokens.of_chat([message])
