"""OpenAI's responses (POST /v1/responses), which vLLM turns into a conversation.

Source: vLLM 0.14.1, 0.19.1, 0.24.0 and 0.32.0. Requests are keyed if all of these make the same
messages: text input, messages, and a function call that is not next to another turn of the model
(newer releases merge these into one message). Tools are not keyed, since releases print them
differently, nor are previous responses, since only the worker that gave one knows its content.
"""

from typing import Any

import msgspec

from extproc.errors import RequestError
from extproc.requests.chat_request import Options, conversation
from extproc.requests.prompt import InferenceRequest

PATH = "/v1/responses"


class _Body(msgspec.Struct):
    input: str | list[dict[str, Any]]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    previous_input_messages: Any = None
    prompt: Any = None
    tools: list[dict[str, Any]] | None = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = "disabled"
    chat_template_kwargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    cache_salt: str | None = None


_body = msgspec.json.Decoder(_Body)


def parse(content: bytes) -> InferenceRequest:
    """Parses the body of a response request.

    Raises:
        RequestError: its prompt cannot be keyed; the error says why.
        msgspec.DecodeError: it is no such request.
    """
    body = _body.decode(content)
    _refuse_what_differs(body)
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    for item in items:
        messages.append(_message(item, messages[-1] if messages else {}))
    effort = (body.reasoning or {}).get("effort")
    options = Options(has_reasoning_effort=effort is not None, orders_calls=False)
    chat = conversation(messages, options)
    # from 0.19 the tokenizer adds its special tokens to the rendered text
    chat = msgspec.structs.replace(chat, add_special_tokens=True, special_tokens_vary=True)
    return InferenceRequest(body.model, [chat], body.cache_salt)


def _refuse_what_differs(body: _Body) -> None:
    history = (body.previous_response_id, body.previous_input_messages, body.prompt)
    if any(part is not None for part in history):
        raise RequestError("unsupported_previous_response")
    if body.tools:
        raise RequestError("unsupported_tools")
    if body.truncation != "disabled":
        raise RequestError("unsupported_truncation")
    if body.chat_template_kwargs:
        raise RequestError("unsupported_template_kwargs")
    if body.kv_transfer_params and body.kv_transfer_params.get("prompt_token_ids") is not None:
        raise RequestError("unsupported_kv_transfer")


def _message(item: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    if item.get("status") in ("in_progress", "incomplete"):
        raise RequestError("unsupported_continuation")
    kind = item.get("type", "message")
    if kind == "function_call_output":
        return _tool_result(item)
    is_models_turn = kind == "function_call" or item.get("role") == "assistant"
    if is_models_turn and before.get("role") == "assistant":
        raise RequestError("unsupported_items")
    if kind == "function_call":
        return _call(item)
    if kind != "message" or "role" not in item:
        raise RequestError("unsupported_items")
    content = item.get("content")
    if item["role"] == "assistant" and not isinstance(content, str):
        content = _only_text(content)
    return {"role": item["role"], "content": content}


def _tool_result(item: dict[str, Any]) -> dict[str, Any]:
    output = item.get("output")
    if not isinstance(output, str):
        raise RequestError("unsupported_items")
    return {"role": "tool", "content": output, "tool_call_id": item.get("call_id")}


def _call(item: dict[str, Any]) -> dict[str, Any]:
    if item.get("namespace"):
        raise RequestError("unsupported_items")
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    call = {"id": item.get("call_id"), "function": function, "type": "function"}
    return {"role": "assistant", "tool_calls": [call]}


def _only_text(content: object) -> str:
    """Returns the text of a turn with one part; if there are several, releases use one or all."""
    match content:
        case [{"type": "output_text", "text": str(text)}]:
            return text
    raise RequestError("unsupported_items")
