"""OpenAI's responses (POST /v1/responses), which vLLM turns into a conversation.

Source: vLLM 0.14.1, 0.19.1, 0.24.0 to 0.32.0 (openai/responses/utils.py and protocol.py,
tool_parsers/utils.py). Text input, messages, and a function call that is not next to another turn
of the model make the same messages in all of these. Other items, and tools, need the engine's
dialect. Previous responses are not keyed, since only the worker that gave one knows its content.
"""

from functools import partial
from typing import Any, NamedTuple

import msgspec

from extproc.base.errors import RequestError
from extproc.requests import sglang_responses
from extproc.requests.chat_request import (
    ChatOptions,
    arguments_of,
    choice_in,
    conversation,
    effort_in,
)
from extproc.requests.dialect import BY_LIBRARY, Dialect, DialectFor, agreed
from extproc.requests.function_tools import function_of
from extproc.requests.given_ids import given_ids
from extproc.requests.known_messages import KnownMessages
from extproc.requests.known_tools import PrintedTools, ToolList, Tools, read_tools
from extproc.requests.library_tools import COMMON_FIELDS, printed_function
from extproc.requests.prompt import (
    ITEMS,
    LEFT_OUT,
    NO_TOOLS,
    NULL,
    PRINTED,
    TOOL_FIELDS,
    Chat,
    InferenceRequest,
    Response,
    is_given,
)

PATH = "/v1/responses"

# What a custom tool takes, as a function. Source: vLLM 0.32, custom_tool_parameters.
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {
        "input": {"type": "string", "description": "The freeform text payload for this tool."}
    },
    "required": ["input"],
    "additionalProperties": False,
}

# Kinds of tools that engines offer to a model; the others run elsewhere, and no template gets them.
_FUNCTION, _NAMESPACE, _CUSTOM = "function", "namespace", "custom"


class _ResponsesBody(msgspec.Struct):
    input: str | list[msgspec.Raw]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    previous_input_messages: Any = None
    prompt: Any = None
    tools: msgspec.Raw = NULL
    tool_choice: Any = None
    reasoning: dict[str, Any] | None = None
    truncation: str | None = "disabled"
    chat_template_kwargs: dict[str, Any] | None = None
    kv_transfer_params: msgspec.Raw = NULL
    cache_salt: str | None = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None


_body = msgspec.json.Decoder(_ResponsesBody)
_item = msgspec.json.Decoder(dict[str, Any])
_known = KnownMessages(_item.decode)


def parse(content: bytes, dialect_for: DialectFor = agreed) -> InferenceRequest:
    """Parses the body of a response request.

    dialect_for: as in `extproc.requests.request.parse`.

    Raises:
        RequestError: its prompt cannot be keyed; the error says why.
        msgspec.DecodeError: it is no such request.
    """
    body = _body.decode(content)
    dialect = dialect_for(body.model)
    if dialect is not None and dialect.is_rust:
        raise RequestError("unsupported_by_engine")  # it answers 404 or 501
    if dialect is not None and dialect.sglang is not None:
        return sglang_responses.parse(content, dialect.sglang, dialect)
    _refuse_what_differs(body)
    if dialect is not None and dialect.is_foreign:
        raise RequestError("unsupported_by_engine")
    tools = read_tools(body.tools)
    if tools is not None and tools.sent and dialect is None:
        raise RequestError("unsupported_tools")
    turns = _Turns(dialect)
    if body.instructions:
        turns.messages.append({"role": "system", "content": body.instructions})
    given = body.input if isinstance(body.input, str) else _known.read(body.input)
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for item in items:
        turns.add(item)
    takes_arguments = dialect is None or dialect.takes_arguments
    ids = given_ids(body.kv_transfer_params, dialect, turns.messages, is_response=True)
    if ids is not None:
        return InferenceRequest(body.model, [ids], body.cache_salt)
    options = ChatOptions(
        template_kwargs=body.chat_template_kwargs if takes_arguments else None,
        add_generation_prompt=not turns.is_unfinished,
        continue_final_message=turns.is_unfinished,
        orders_calls=False,
        effort=effort_in((body.reasoning or {}).get("effort")),
        effort_rule=None if dialect is None else dialect.responses_effort,
        dialect=dialect,
        forms=turns.forms | (LEFT_OUT if body.chat_template_kwargs else 0),
        processor_arguments=arguments_of(body.mm_processor_kwargs, body.media_io_kwargs),
    )
    chat = conversation(turns.messages, options)
    if tools is not None and tools.sent and dialect is not None:
        chat = _with_tools(chat, tools, body.tool_choice, dialect)
    # from 0.19 the tokenizer adds its special tokens to the rendered text
    adds = dialect is None or dialect.adds_special_tokens
    response = Response(given, body.instructions, [] if tools is None else tools.sent)
    chat = msgspec.structs.replace(
        chat, add_special_tokens=adds, special_tokens_vary=True, response=response
    )
    needs_text = turns.is_unfinished or is_given(body.kv_transfer_params)
    return InferenceRequest(body.model, [chat], body.cache_salt, needs_text=needs_text)


def _refuse_what_differs(body: _ResponsesBody) -> None:
    history = (body.previous_response_id, body.previous_input_messages, body.prompt)
    if any(part is not None for part in history):
        raise RequestError("unsupported_previous_response")
    if body.truncation != "disabled":
        raise RequestError("unsupported_truncation")


def _with_tools(chat: Chat, tools: ToolList, choice: object, dialect: Dialect) -> Chat:
    forms, is_none = chat.forms | ITEMS, choice == "none"
    if is_none:
        forms |= NO_TOOLS
    if is_none and not dialect.keeps_tools_for_none:
        return msgspec.structs.replace(chat, forms=forms, tool_choice="none")
    if dialect.tools in BY_LIBRARY:
        forms |= PRINTED
    rules = (PATH, dialect.tools, dialect.flattens_namespaces, dialect.takes_custom_tools)
    printed = tools.printed(rules, partial(_all_functions, dialect))
    return msgspec.structs.replace(
        chat,
        variables={**chat.variables, "tools": printed.tools},
        forms=forms | printed.forms,
        tool_choice=choice_in(choice),
    )


def _all_functions(dialect: Dialect, tools: Tools) -> PrintedTools:
    functions = [one for tool in tools for one in _functions(tool, dialect)]
    printed = [_printed(one, dialect) for one in functions]
    is_common = all(one.fields.keys() <= COMMON_FIELDS for one in functions)
    return PrintedTools(printed, 0 if is_common else TOOL_FIELDS)


class _Function(NamedTuple):
    """A function that a tool offers to the model.

    name: by which the model knows it. fields: of the tool. is_inner: whether it is in a namespace.
    """

    name: object
    fields: dict[str, Any]
    is_inner: bool = False


def _functions(tool: dict[str, Any], dialect: Dialect) -> list[_Function]:
    """Returns the functions that a tool offers to the model."""
    kind = tool.get("type")
    if kind == _FUNCTION:
        return [_Function(tool.get("name"), tool)]
    if kind == _NAMESPACE and dialect.flattens_namespaces:
        inner = tool.get("tools")
        if not isinstance(inner, list):
            raise RequestError("bad_request")
        functions = [one for one in inner if isinstance(one, dict) and one.get("type") == _FUNCTION]
        return [
            _Function(_in_namespace(tool.get("name"), one.get("name")), one, is_inner=True)
            for one in functions
        ]
    if dialect.tools in BY_LIBRARY:
        raise RequestError("unsupported_tools")  # all of its fields are printed as a function's
    if kind == _CUSTOM and dialect.takes_custom_tools:
        match tool.get("format"):
            case {"type": "grammar"}:
                raise RequestError("bad_request")  # the engine refuses it
        shim = {"description": tool.get("description"), "parameters": _CUSTOM_PARAMETERS}
        return [_Function(tool.get("name"), shim)]
    return []


def _printed(function: _Function, dialect: Dialect) -> dict[str, Any]:
    name, fields, is_inner = function
    if dialect.tools in BY_LIBRARY:
        return printed_function(fields, dialect.tools, name, in_namespace=is_inner)
    printed = function_of({**fields, "name": name})
    return {"type": "function", "function": printed}


def _in_namespace(namespace: object, name: object) -> str:
    if not isinstance(namespace, str) or not isinstance(name, str):
        raise RequestError("bad_request")
    return f"{namespace}__{name}"


class _Turns:
    """The messages that a response's items make, one after the other.

    forms: ITEMS if releases make different ones. is_unfinished: whether the last item is one that
    the model is to go on with.
    """

    def __init__(self, dialect: Dialect | None) -> None:
        self._dialect = dialect
        self.messages: list[dict[str, Any]] = []
        self.forms = 0
        self.is_unfinished = False

    def add(self, item: dict[str, Any]) -> None:
        """Adds an item.

        Raises:
            RequestError: it cannot be keyed.
        """
        kind = item.get("type", "message")
        is_open = item.get("status") in ("in_progress", "incomplete")
        self.is_unfinished = is_open and kind in ("message", "reasoning")
        if is_open:
            self._differs()
        if kind == "function_call_output":
            self._result(item, is_custom=False)
        elif kind == "function_call":
            self._call(_name_of(item), item.get("call_id"), item.get("arguments"))
            if item.get("namespace"):
                self._differs()
        elif kind == "custom_tool_call_output":
            self._result(item, is_custom=True)
        elif kind == "custom_tool_call":
            self._custom_call(item)
        elif kind == "reasoning":
            self._reasoning(item)
        elif kind != "message" or "role" not in item:
            raise RequestError("unsupported_items")
        elif item["role"] == "assistant":
            self._text(item)
        else:
            self.messages.append({"role": item["role"], "content": item.get("content")})

    def _differs(self) -> Dialect:
        """Notes that releases differ, and returns the rules.

        Raises:
            RequestError: nothing is known of the engine's.
        """
        self.forms = ITEMS
        if self._dialect is None:
            raise RequestError("unsupported_items")
        return self._dialect

    def _result(self, item: dict[str, Any], *, is_custom: bool) -> None:
        output = item.get("output")
        if is_custom and not self._differs().takes_custom_tools:
            raise RequestError("unsupported_items")
        if isinstance(output, list):
            self._differs()
        elif not isinstance(output, str):
            raise RequestError("unsupported_items")
        self.messages.append(
            {"role": "tool", "content": output, "tool_call_id": item.get("call_id")}
        )

    def _call(self, name: object, call_id: object, arguments: object) -> None:
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "function": function, "type": "function"}
        turn = self._open_turn()
        if turn is None:
            self.messages.append({"role": "assistant", "tool_calls": [call]})
        else:
            turn.setdefault("tool_calls", []).append(call)

    def _custom_call(self, item: dict[str, Any]) -> None:
        payload = item.get("input")
        if not self._differs().takes_custom_tools or not isinstance(payload, str | None):
            raise RequestError("unsupported_items")
        self._call(item.get("name"), item.get("call_id"), {"input": payload or ""})

    def _reasoning(self, item: dict[str, Any]) -> None:
        self._differs()
        if item.get("encrypted_content"):
            raise RequestError("unsupported_items")  # vLLM refuses it, SGLang reads its own
        self._join("reasoning", _reasoning_text(item))

    def _text(self, item: dict[str, Any]) -> None:
        content = item.get("content")
        is_output = isinstance(content, list) and "type" in item and not _is_input(content)
        text = content if isinstance(content, str) else self._first_text(content)
        if is_output or self._dialect is None or self._dialect.merges_texts:
            self._join("content", text)
        else:
            self.forms |= ITEMS if self._is_open else 0
            self.messages.append({"role": "assistant", "content": text})

    def _join(self, key: str, text: str) -> None:
        """Adds a part of a turn to the one before, or as a new one if that has such a part."""
        turn = self._open_turn()
        if turn is None or turn.get(key) is not None:
            self.messages.append({"role": "assistant", key: text})
        else:
            turn[key] = text

    @property
    def _is_open(self) -> bool:
        return bool(self.messages) and self.messages[-1]["role"] == "assistant"

    def _open_turn(self) -> dict[str, Any] | None:
        """Returns the model's turn that the next item of it joins; None if that begins one."""
        turn = self.messages[-1] if self.messages else None
        if turn is None or turn["role"] != "assistant" or not self._differs().merges_turns:
            return None
        return turn

    def _first_text(self, content: object) -> str:
        """Returns the text of a turn's first part; releases differ on the others."""
        match content:
            case [{"type": "output_text" | "input_text", "text": str(text)}, *others]:
                if others or _is_input(content):
                    self._differs()
                return text
        raise RequestError("unsupported_items")


def _is_input(content: object) -> bool:
    """Returns whether a turn of the model is sent as if it were a user's."""
    match content:
        case [{"type": "input_text"}, *_]:
            return True
    return False


def _name_of(item: dict[str, Any]) -> object:
    namespace = item.get("namespace")
    return _in_namespace(namespace, item.get("name")) if namespace else item.get("name")


def _reasoning_text(item: dict[str, Any]) -> str:
    """Returns the text of a reasoning item: of its content, else of its summary."""
    for parts in (item.get("content"), item.get("summary")):
        if parts is None or parts == []:
            continue
        first = parts[0] if isinstance(parts, list) else None
        text = first.get("text") if isinstance(first, dict) else None
        if not isinstance(text, str):
            raise RequestError("unsupported_items")
        return text
    return ""
