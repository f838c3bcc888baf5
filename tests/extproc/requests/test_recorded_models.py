"""The rules for fields, against what vLLM's request models say of them."""

import json
from typing import Any

import msgspec
import pytest

from extproc.requests import chat_request, completion_request, messages_request, responses_request
from extproc.requests.chat_request import messages_of
from extproc.requests.dialect import NEWEST
from extproc.requests.function_tools import FLAGS, printed_tools
from extproc.requests.media import MEDIA_PARTS
from extproc.requests.part_fields import PART_FIELDS
from tests.extproc.requests.recorded_models import NEWEST_RECORD, RECORDS, Record

UNKNOWN = "kvsteer_unknown"

# Fields of bodies that decide how a prompt is answered, logged or billed, not what it is.
HARMLESS = frozenset(
    (
        "allowed_token_ids",
        "background",
        "bad_words",
        "ec_transfer_params",
        "enable_response_messages",
        "frequency_penalty",
        "ignore_eos",
        "include",
        "include_reasoning",
        "include_stop_str_in_output",
        "length_penalty",
        "logit_bias",
        "logprob_token_ids",
        "logprobs",
        "max_completion_tokens",
        "max_output_tokens",
        "max_tokens",
        "max_tool_calls",
        "metadata",
        "min_p",
        "min_tokens",
        "mm_payload",
        "parallel_tool_calls",
        "presence_penalty",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "repetition_detection",
        "repetition_penalty",
        "request_id",
        "return_mm_kwargs",
        "return_prompt_text",
        "return_token_ids",
        "return_token_offsets",
        "return_tokens_as_token_ids",
        "return_weight_versions",
        "routed_experts_prompt_start",
        "safety_identifier",
        "seed",
        "service_tier",
        "session_id",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_sequences",
        "stop_token_ids",
        "store",
        "stream",
        "stream_interval",
        "stream_options",
        "structured_outputs",
        "temperature",
        "text",
        "thinking_token_budget",
        "top_k",
        "top_logprobs",
        "top_p",
        "use_beam_search",
        "user",
        "vllm_xargs",
        "watermarking",
    )
)

# And those that do so in one API only.
OF_COMPLETIONS = frozenset(("kv_transfer_params", "response_format"))

BODIES = {
    "chat body": chat_request._ChatBody,
    "completion body": completion_request._CompletionBody,
    "messages body": messages_request._MessagesBody,
    "responses body": responses_request._ResponsesBody,
}

RELEASES = pytest.mark.parametrize("record", RECORDS.values(), ids=RECORDS)


@RELEASES
@pytest.mark.parametrize(("kind", "body"), BODIES.items())
def test_each_field_of_a_body_is_read_or_known_to_be_harmless(
    record: Record, kind: str, body: type[Any]
) -> None:
    read = {field.name for field in msgspec.structs.fields(body)}
    harmless = HARMLESS | (OF_COMPLETIONS if kind == "completion body" else set())
    assert set(record.objects[kind]["fields"]) - read - harmless == set()


@RELEASES
def test_tools_are_printed_with_the_fields_of_the_models(record: Record) -> None:
    function = {UNKNOWN: 1, "parameters": {}, "name": "f", **dict.fromkeys(FLAGS, True)}
    (tool,) = printed_tools([{UNKNOWN: 1, "defer_loading": True, "function": function}]).tools
    assert list(tool) == record.objects["chat tool"]["shown"]
    assert list(tool["function"]) == record.objects["chat function"]["shown"]
    assert list(tool["function"]) == record.objects["responses function"]["shown"]


@RELEASES
def test_tools_of_messages_have_no_other_fields_than_those_passed_on(record: Record) -> None:
    assert set(record.objects["messages tool"]["fields"]) == {
        "name",
        "description",
        "input_schema",
        *FLAGS,
    }


def test_fields_of_parts_are_those_of_the_newest_models() -> None:
    assert sorted(PART_FIELDS) == NEWEST_RECORD.objects["chat part"]["fields"]


@RELEASES
@pytest.mark.parametrize("role", ["user", "assistant", "system", "tool", UNKNOWN])
def test_messages_have_the_fields_that_templates_get(record: Record, role: str) -> None:
    names = ("name", "reasoning", "reasoning_content", "task", "tool_call_id", UNKNOWN)
    sent = {**dict.fromkeys(names, "x"), "tool_calls": [], "role": role, "content": "x"}
    (message,), *_ = messages_of([sent])
    shown = set(record.objects[f"chat message of {role}"]["shown"])
    assert set(message) == shown - {"tool_calls"}  # none are left out


@RELEASES
def test_kinds_of_parts_are_read_or_refused_by_all(record: Record) -> None:
    kinds = record.objects["kinds of chat parts"]["fields"]
    assert set(kinds) - chat_request._TEXT_PARTS.keys() - MEDIA_PARTS.keys() == {
        "audio_embeds",
        "image_embeds",
        "image_pil",
        "prompt_embeds",
        "tool_reference",
        "video_embeds",
    }


@RELEASES
def test_kinds_of_blocks_are_all_read(record: Record) -> None:
    kinds = record.objects["kinds of messages blocks"]["fields"]
    blocks: dict[str, dict[str, Any]] = {
        "text": {"text": "a"},
        "image": {"source": {"type": "base64", "data": "AA=="}},
        "tool_use": {"id": "1", "name": "f", "input": {}},
        "tool_result": {"tool_use_id": "1"},
        "thinking": {"thinking": "hm"},
    }
    for kind in set(kinds) - {"tool_addition", "tool_removal"}:
        block = {"type": kind, **blocks.get(kind, {})}
        for role in ("user", "assistant"):
            body = {"messages": [{"role": role, "content": [{"type": "text", "text": "a"}, block]}]}
            assert messages_request.parse(json.dumps(body).encode(), lambda _: NEWEST).prompts
