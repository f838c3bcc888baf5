"""Requests with values that clients may send one day, of every field that SGLang's models name.

Roles, kinds of parts, blocks, items and tools, arguments of calls, efforts, types in schemas: known
ones, unknown ones, and some of a wrong kind; each alone in a small request. `unknown_fields` adds
one field more to every kind of object.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent

# What SGLang made of each case (`tests.engines.sglang_judge` writes it): its prompts with both
# templates, or null where it refused.
RECORDED = HERE / "values.jsonl"

# Templates that write all that they get; the second one has a loop over parts, so that it gets
# contents in parts.
WHOLE = (HERE / "whole.jinja").read_text()
_LOOP = "{% for message in messages %}{% for part in message.content %}{% endfor %}{% endfor %}"
TEMPLATES = (WHOLE, WHOLE + _LOOP)

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"

Body = dict[str, Any]

WIDE = 2**64
USER: Body = {"role": "user", "content": "hi"}
FUNCTION: Body = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "properties": {"a": {"type": "string"}}},
}
TOOL: Body = {"type": "function", "function": FUNCTION}
SCHEMA: Body = {"name": "f", "description": "d", "input_schema": {"type": "object"}}
ITEM: Body = {"type": "message", "role": "user", "content": "hi"}


class Case(NamedTuple):
    """A request. name: of what it tries."""

    name: str
    path: str
    body: Body


def chat(name: str, *messages: Body, **fields: Any) -> Case:
    """A chat completion of these messages, or of a plain one."""
    return Case(name, CHAT, {"model": "m", "messages": [*messages] or [USER], **fields})


def message(name: str, *messages: Body, **fields: Any) -> Case:
    """A request of Anthropic's API."""
    body = {"model": "m", "max_tokens": 9, "messages": [*messages] or [USER], **fields}
    return Case(name, MESSAGES, body)


def response(name: str, *items: Body, **fields: Any) -> Case:
    """A response request: of these items, or of a text."""
    return Case(name, RESPONSES, {"model": "m", "input": [*items] or "hi", **fields})


ROLES = (
    *("system", "assistant", "tool", "function", "developer", "latest_reminder", "root"),
    *("System", "USER", "user", "critic"),
)
PARTS: Sequence[Any] = (
    *({"type": kind, "text": "a"} for kind in ("text", "input_text", "output_text", "new_part")),
    {"type": "text", "text": None},
    {"type": "refusal", "refusal": "a"},
    {"type": "thinking", "thinking": "a"},
    {"type": "thinking"},
    {"type": "reasoning", "text": "a"},
    {"type": "tool_reference", "name": "f"},
    {"type": "tool_reference", "tool_name": "f"},
    {"type": "file", "file": {}},
    *({"text": "a"}, "a"),
)
ARGUMENTS: Sequence[Any] = (
    *('{"a": 1}', "{}", "", "null", "[1]", '{"a": 1', '{"a": NaN}', '{"a": 1e400}', '"x"'),
    *(f'{{"a": {WIDE}}}', '{"a": 1.50, "b": -0}', '{"a": "\\ud800"}', '{"a": 1, "a": 2}'),
    *({"a": 1}, {"a": WIDE + 1}, None, 5, [1]),
)
CALLS: Sequence[Body] = (
    {"function": {"name": "f"}},
    {"id": 1, "function": {}},
    *({"index": one, "function": {}} for one in (1, "1", 1.0, True, 1.5, "x", " 2 ")),
    {"type": "custom", "custom": {"name": "f", "input": "x"}},
    {"function": {"name": 1}},
    {"id": "c"},
    {"function": {"name": "f", "arguments": "{}", "x_new": 1}, "x_new": 2},
)
FIELDS: Sequence[Body] = (
    *({"prefix": one} for one in (True, "yes", 2, None)),
    *({"phase": one} for one in ("commentary", "x", None)),
    *({"tools": one} for one in ([TOOL], [], [{"function": {"name": "f", "strict": True}}], "x")),
    *({"name": 1}, {"tool_call_id": 3}, {"reasoning_content": "r"}, {"reasoning": "r"}),
    *({"refusal": "no"}, {"audio": {}}, {"partial": True}, {"task": "t"}),
    {"function_call": {"name": "f", "arguments": "{}"}},
)
_MORE: Sequence[Body] = (
    {"defer_loading": True},
    *({"strict": one} for one in (1, "true", None, "x")),
    *({"description": 5}, {"name": None}, {"parameters": True}),
    {"key_order": ["name"], "annotations": {}, "title": "T"},
)
TOOLS: Sequence[Any] = (
    *([TOOL], [], None, [TOOL, TOOL], ["x"], [{"function": FUNCTION}]),
    [{"type": "custom", "function": FUNCTION}],
    [{"type": "custom", "custom": {"name": "f"}}],
    [{"type": "web_search"}],
    [{"type": None, "function": FUNCTION}],
    [{**TOOL, "defer_loading": True}],
    [
        {
            "type": "function",
            "function": {**FUNCTION, "defer_loading": False},
            "defer_loading": "yes",
        }
    ],
    *([{"type": "function", "function": {**FUNCTION, **more}}] for more in _MORE),
    [{"type": "function", "function": {"parameters": {}, "name": "f"}, "cache_control": {}}],
    [{"type": "function", "function": {"name": "f", "parameters": None, "description": None}}],
)
CHOICES: Sequence[Any] = (
    *(None, "auto", "none", "required", "x", 5),
    {"type": "auto"},
    {"type": "allowed_tools", "mode": "auto", "tools": []},
    *({"function": {"name": "f"}}, {"type": "function", "function": {"name": "f"}}),
    {"type": "custom", "function": {"name": "f"}},
    *({"type": "function", "function": {"name": "g"}}, {"type": "function", "name": "f"}),
    {"type": "function", "function": {}},
)
SCHEMAS: Sequence[Any] = (
    *({"type": one} for one in ("varchar(20)", "Int32", "dict[str, int]", "internal", "Object", 5)),
    *({"type": one} for one in (["str", "string", "null"], ["string", "string"])),
    {
        "properties": {
            "type": {"type": "uuid"},
            "x": {"type": "list<int>", "items": {"type": "num"}},
        }
    },
    {"type": "object", "default": {"type": "varchar"}, "examples": [{"type": "varchar"}]},
    {"$defs": {"a": {"type": "bool"}}, "anyOf": [{"type": "map"}, {"type": "arr"}]},
    {"additionalProperties": {"type": "long"}, "patternProperties": {"a": {"type": "decimal(9)"}}},
    *({"maximum": WIDE}, {"items": [{"type": "str"}]}, {"enum": [{"type": "str"}]}),
    {"properties": [1]},
)
EFFORTS: Sequence[Any] = (
    *("none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max", "x"),
    *(0.5, 0, 0.99, 1, "0.5", "0.50", "nan", True, None, [], -0.1),
)
REASONING: Sequence[Any] = (
    *({}, {"effort": "low"}, {"effort": "none"}, {"effort": 0.3}, {"effort": "0.3"}),
    *({"reasoning_effort": "high"}, {"effort": True}, {"effort": "x"}, {"enabled": True}),
    *({"enable": "yes"}, {"enabled": False, "effort": "low"}, {"enabled": "no"}),
    *({"summary": "auto"}, "low", [], None),
)
KEYWORDS: Sequence[Body] = (
    *({}, {"x_new": 5}, {"enable_thinking": False}, {"thinking": True}, {"x_new": WIDE}),
    *({"reasoning_effort": one} for one in ("x", 7, None)),
    *({"tools": []}, {"messages": []}, {"conversation": []}, {"conversations": 1}),
    *({"chat_template": "x"}, {"add_generation_prompt": False}, {"tokenize": True}),
    *({"continue_final_message": True}, {"continue_final_message": False}, {"padding": True}),
    *({"truncation": True, "max_length": 3}, {"return_dict": True}, {"return_tensors": "pt"}),
    *({"return_assistant_tokens_mask": True}, {"tokenizer_kwargs": {"a": 1}}),
    {"documents": [{"t": 1}]},
)
OPTIONS: Sequence[Body] = (
    *({"n": 2}, {"documents": [{"text": "d"}]}, {"task": "query"}, {"functions": []}),
    *({"thinking": {"type": "enabled"}}, {"x_new": 1}, {"cache_salt": "s"}, {"stop": "x"}),
    *({"add_generation_prompt": False}, {"modalities": ["text"]}, {"prompt_cache_key": "k"}),
    *({"input_ids": [1, 2]}, {"continue_final_message": True}),
)


def chats() -> Iterator[Case]:
    """Chat completions."""
    for role in ROLES:
        yield chat("role", {"role": role, "content": "x", "name": "n", "tool_call_id": "t"}, USER)
    for part in PARTS:
        for role in ("user", "assistant", "tool"):
            yield chat("part", USER, {"role": role, "content": [PARTS[0], part]}, USER)
            yield chat("part", USER, {"role": role, "content": [part]}, USER)
    for role in ("user", "assistant", "tool"):
        yield chat("no parts", USER, {"role": role, "content": []}, USER)
    yield from _with_calls()
    yield from _with_tools()
    yield from _with_options()


def _with_calls() -> Iterator[Case]:
    for given in ARGUMENTS:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
        for role in ("assistant", "tool"):
            yield chat("arguments", USER, {"role": role, "tool_calls": [call]}, USER)
    for call in CALLS:
        yield chat("call", USER, {"role": "assistant", "tool_calls": [call]}, USER)
    for fields in FIELDS:
        for role in ("assistant", "system", "user"):
            yield chat("field", {"role": role, "content": "x", **fields}, USER)
    yield chat("prefix", {"role": "assistant", "content": "x", "prefix": True})


def _with_options() -> Iterator[Case]:
    for effort in EFFORTS:
        yield chat("effort", reasoning_effort=effort)
    for reasoning in REASONING:
        yield chat("reasoning", reasoning=reasoning)
        yield chat("reasoning", reasoning=reasoning, reasoning_effort="medium")
    for keywords in KEYWORDS:
        yield chat("keyword", chat_template_kwargs=keywords)
        yield chat("keyword", chat_template_kwargs=keywords, reasoning_effort="low")
    for option in OPTIONS:
        yield chat("option", **option)
        yield chat("option", USER, {"role": "assistant", "content": "so"}, **option)
    yield chat("last turn", USER, {"role": "assistant", "content": [PARTS[0]]})


def _with_tools() -> Iterator[Case]:
    for tools in TOOLS:
        yield chat("tools", tools=tools)
        for choice in ("none", "required", CHOICES[-5]):
            yield chat("tools", tools=tools, tool_choice=choice)
    for choice in CHOICES:
        yield chat("choice", tools=[TOOL], tool_choice=choice)
    own = {"role": "system", "content": "x", "tools": [TOOL]}
    yield chat("own tools", own, USER, tool_choice="required")
    yield chat("own tools", {**own, "role": "assistant"}, USER, tool_choice="required")
    others = [{"function": {"name": "g"}}]
    yield chat("own tools", own, USER, tool_choice=CHOICES[-5], tools=others)
    for schema in SCHEMAS:
        function = {"name": "f", "parameters": schema}
        yield chat("schema", tools=[{"type": "function", "function": function}])


REFERENCES: Sequence[Body] = (
    *({"type": "text", "text": "a"}, {"type": "tool_reference", "tool_name": "f"}),
    *({"type": "tool_reference", "name": "g"}, {"type": "text", "text": "b"}),
)
FOUND: Body = {
    "type": "search_result",
    "title": "t",
    "source": "s",
    "content": [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}],
}
BLANK: Body = {"type": "text", "text": ""}
BLOCKS: Sequence[Body] = (
    *({"type": "text", "text": "a"}, {"type": "text", "text": ""}, {"type": "text", "text": 5}),
    {"type": "text", "text": "a", "cache_control": {}, "citations": None},
    *({"type": "image"}, {"type": "image", "source": {"type": "base64", "data": ""}}),
    {"type": "image", "source": "x"},
    {"type": "tool_use", "id": "i", "name": "g", "input": {"b": 1.50, "a": "é", "c": WIDE}},
    *({"type": "tool_use", "id": "i", "name": "g"}, {"type": "tool_use", "input": None}),
    *(
        {"type": "tool_result", "tool_use_id": "i", "content": content}
        for content in (
            *("r", None, [], [*REFERENCES], [REFERENCES[1]], [FOUND, BLANK]),
            *([FOUND], [{"type": "thinking", "thinking": "x"}], [{"type": "document"}], 1),
        )
    ),
    {"type": "tool_result", "id": "i", "is_error": True},
    {"type": "tool_reference", "tool_name": "f"},
    {"type": "search_result", "title": "t", "source": {"url": "u"}, "content": []},
    *({"type": "search_result"}, {**FOUND, "content": [{"type": "text"}]}),
    *({"type": "thinking", "thinking": one, "signature": "s"} for one in ("hm", "", None)),
    *({"type": "redacted_thinking", "data": "x"}, {"type": "document", "source": {}}),
    *({"type": "server_tool_use", "id": "i", "name": "g", "input": {}}, {"text": "a"}),
)
DECLARED: Sequence[Any] = (
    *([], [SCHEMA], [{**SCHEMA, "type": "custom"}], [{**SCHEMA, "type": "mcp"}], [{"name": "f"}]),
    *([{**SCHEMA, "strict": one}] for one in (True, "yes", None)),
    *([{**SCHEMA, "defer_loading": one}] for one in (True, None)),
    *([{**SCHEMA, "input_schema": one}] for one in ({}, {"type": "varchar"})),
    *([{**SCHEMA, "type": None}], [{**SCHEMA, "description": None}]),
    [{**SCHEMA, "cache_control": {}, "input_examples": [], "title": "T"}],
    [{"type": "web_search_20250305", "name": "web_search"}],
    [SCHEMA, {"type": "bash_20250124", "name": "bash"}],
)
FORCED: Sequence[Body] = (
    *({"type": one} for one in ("auto", "any", "none", "x")),
    *({"type": "tool", "name": one} for one in ("f", "g")),
)
SETTINGS: Sequence[Body] = (
    *({"output_config": {"effort": one}} for one in ("low", "xhigh", "ultra", "none", "x", None)),
    {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
    *({"cache_salt": "s"}, {"container": "x"}, {"mcp_servers": []}, {"thinking": None}),
    *({"thinking": {"type": "disabled"}}, {"thinking": {"type": "adaptive"}}),
    *({"system": ""}, {"system": " "}, {"system": "s"}, {"chat_template_kwargs": {"x_new": 1}}),
)


def messages() -> Iterator[Case]:
    """Requests of Anthropic's API."""
    text = {"type": "text", "text": "x"}
    for block in BLOCKS:
        for role in ("user", "assistant", "system"):
            yield message("block", USER, {"role": role, "content": [block]}, USER)
            yield message("block", USER, {"role": role, "content": [text, block, text]}, USER)
        yield message("system block", system=[text, block])
    for role in ("user", "assistant"):
        yield message("no blocks", USER, {"role": role, "content": []}, USER)
    yield message("role", {"role": "developer", "content": "x"}, USER)
    yield message("later system", USER, {"role": "system", "content": " late "}, USER, system="s")
    yield message("last turn", USER, {"role": "assistant", "content": "so"})
    for tools in DECLARED:
        yield message("tools", tools=tools)
        for choice in FORCED:
            yield message("tools", tools=tools, tool_choice=choice)
    for setting in SETTINGS:
        yield message("setting", **setting)


ITEMS: Sequence[Body] = (
    {"role": "user", "content": "x"},
    *({"role": role, "content": None} for role in ("user", "assistant")),
    *({"role": role, "content": "x", "name": "n"} for role in ("critic", "developer", "system")),
    {"role": "developer", "content": [{"type": "input_text", "text": "x"}]},
    {"role": "assistant", "content": "x", "phase": "commentary"},
    {"role": "assistant", "content": "", "phase": "final_answer", "type": "message"},
    {"role": "assistant", "content": "x", "prefix": True, "reasoning_content": "r", "x_new": 1},
    *(
        {"role": "assistant", "content": [part], "id": "i", "status": "completed"}
        for part in (
            {"type": "output_text", "text": "x", "annotations": []},
            *({"type": "refusal", "refusal": "x"}, {"type": "input_text"}),
            *({"type": "input_text", "text": 5}, {"type": "input_file", "file_id": "x"}),
            *({"type": "new_part"}, {"type": "tool_reference", "name": "f"}),
        )
    ),
    *(
        {"type": "function_call", "name": "f", "call_id": "c", "arguments": given}
        for given in ('{"a": 1}', "{", "", "[]", {"a": WIDE}, None)
    ),
    {"type": "function_call", "id": "i", "namespace": "n", "arguments": "{}"},
    *(
        {"type": "function_call_output", "call_id": "c", "output": output}
        for output in (
            *("o", None, {"a": 1}, [{"text": 5}]),
            [{"type": "input_text", "text": "o"}, {"type": "input_text", "text": "p"}],
        )
    ),
    {"type": "function_call_output", "call_id": "c"},
    *({"type": "custom_tool_call", "name": "f", "call_id": "c", "input": i} for i in ("é", None)),
    {"type": "custom_tool_call_output", "call_id": "c", "output": "o"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
    *({"type": "reasoning", "encrypted_content": "gAAA"}, {"type": "reasoning", "summary": "x"}),
    *({"type": "item_reference", "id": "x"}, {"type": "web_search_call", "id": "x"}),
    *({"type": "compaction", "encrypted_content": "x"}, {"type": "new_item"}),
)
OFFERED: Sequence[Any] = (
    [],
    *(
        [{"type": "function", "name": "f", **more}]
        for more in (
            *({}, {"strict": None}, {"strict": "yes", "parameters": {"type": "varchar"}}),
            {"defer_loading": True, "x_new": 1, "parameters": {"maximum": WIDE}},
            *({"parameters": None, "description": None}, {"description": 5}),
        )
    ),
    [{"type": "custom", "name": "f", "format": {"type": "grammar", "definition": "s"}}],
    *([{"type": "custom", "name": "f", "format": {"type": "text"}}], [{"type": "custom"}]),
    *([{"type": "function"}], [{"type": "web_search"}], [{"type": "shell"}], [{"type": "new"}]),
    [{"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}],
)
NAMED: Sequence[Any] = (
    *("auto", "none", "required", "x", {"type": "web_search"}, {"type": "allowed_tools"}),
    *({"type": "function", "name": "f"}, {"type": "custom", "name": "f"}),
    *({"type": "function", "name": "g"}, {"type": "function", "function": {"name": "f"}}),
)
MORE: Sequence[Body] = (
    *({"reasoning": one} for one in ({}, {"effort": "low"}, {"effort": "none"}, {"effort": None})),
    *({"reasoning": one} for one in ({"effort": "ultra"}, {"effort": 0.5}, {"x_new": 1}, None)),
    *({"cache_salt": "s"}, {"instructions": "i"}, {"instructions": ""}, {"truncation": "auto"}),
    *({"text": {"format": {"type": "text"}}}, {"include": ["x"]}, {"store": False}, {"x_new": 1}),
    *({"prompt_cache_key": "k"}, {"conversation": "c"}, {"prompt": {"id": "p"}}),
    {"chat_template_kwargs": {"x_new": 2, "reasoning_effort": "x"}},
)


def responses() -> Iterator[Case]:
    """Response requests."""
    then = {"role": "assistant", "content": "then"}
    for item in ITEMS:
        yield response("item", ITEM, item, ITEM)
        yield response("item", ITEM, item, then, item, ITEM)
    for tools in OFFERED:
        yield response("tools", tools=tools)
        for choice in NAMED:
            yield response("tools", tools=tools, tool_choice=choice)
    for fields in MORE:
        yield response("more", **fields)
        yield response("more", ITEM, **fields)


CASES = [*chats(), *messages(), *responses()]

# A field that nobody knows, and fields that some object has, where others have none.
ADDED: Mapping[str, Any] = {
    "x_new": {"a": [1, "b"]},
    "cache_control": {"type": "ephemeral"},
    "defer_loading": True,
    "strict": False,
    "phase": "commentary",
    "status": "completed",
    "id": "x_1",
    "name": "n_1",
    "title": "T",
    "annotations": {"readOnlyHint": True},
    "input_examples": [{"a": 1}],
}

# What stands below is the user's: every key of it counts.
_FREE = ("input_schema", "parameters", "schema", "input", "arguments", "chat_template_kwargs")


def unknown_fields(body: Body) -> Iterator[Body]:
    """Yields a body once for each field and each place, with that field added there."""
    for place in _places(body, ()):
        for name, value in ADDED.items():
            changed = copy.deepcopy(body)
            target: Any = changed
            for step in place:
                target = target[step]
            if name not in target:
                target[name] = value
                yield changed


def _places(value: object, at: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yields where the objects of a body are; of `input`, only lists hold the engine's own."""
    if isinstance(value, dict):
        yield at
        for key, one in value.items():
            if key not in _FREE or isinstance(one, list):
                yield from _places(one, (*at, key))
    elif isinstance(value, list):
        for index, one in enumerate(value):
            yield from _places(one, (*at, index))
