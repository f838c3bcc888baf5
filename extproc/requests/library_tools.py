"""How the OpenAI library prints the functions of a response request, by its release.

vLLM before 0.27 reads the tools as the library's types, and templates get all fields of them, also
those that a client leaves out. So the prompt depends on the library beside the engine, of which
nobody tells the release: a worker's prompts show which of a few it is.

Source: `FunctionTool` (responses/function_tool.py) and `ToolFunction` (namespace_tool.py) of openai
2.0 to 3.54; `construct_tool_dicts` of vLLM 0.24 (openai/responses/utils.py) and
`iter_response_function_tool_dicts` of 0.25 and 0.26 (tool_parsers/utils.py), which call model_dump.
"""

from collections.abc import Mapping
from typing import Any

from extproc.base.errors import RequestError
from extproc.requests.dialect import Printed

# The fields of a function among the tools, and of one in a namespace, in the library's order.
_FUNCTIONS: Mapping[Printed, tuple[str, ...]] = {
    Printed.OPENAI_2_0: ("name", "parameters", "strict", "type", "description"),
    Printed.OPENAI_2_25: ("name", "parameters", "strict", "type", "defer_loading", "description"),
    Printed.OPENAI_2_50: (
        "name",
        "parameters",
        "strict",
        "type",
        "allowed_callers",
        "defer_loading",
        "description",
        "output_schema",
    ),
    Printed.OPENAI_3_8: (
        "name",
        "parameters",
        "strict",
        "type",
        "allowed_callers",
        "async_",
        "defer_loading",
        "description",
        "output_schema",
    ),
}
# By which name the library prints a field that it has another name for.
_ALIASES = {"async": "async_"}

_LEADING, _TRAILING = ("name", "type"), ("parameters", "strict")

# What a client may say of a function without any release of the library knowing it otherwise.
COMMON_FIELDS = frozenset(("type", "name", "description", "parameters", "strict"))
_KINDS: Mapping[str, type[Any] | tuple[type[Any], ...]] = {
    "name": str,
    "description": (str, type(None)),
    "parameters": (dict, type(None)),
    "strict": (bool, type(None)),
}


def printed_function(
    tool: Mapping[str, Any], printed: Printed, name: object, *, in_namespace: bool
) -> dict[str, Any]:
    """Returns a function as a template gets it.

    printed: by which releases of the library. name: by which the model knows it.

    Raises:
        RequestError: it has fields of a wrong kind.
    """
    given = {_ALIASES.get(key, key): value for key, value in tool.items()} | {"name": name}
    if not all(isinstance(given.get(field), kind) for field, kind in _KINDS.items()):
        raise RequestError("bad_request")
    fields = _FUNCTIONS[printed]
    if in_namespace:
        rest = [one for one in fields if one not in (*_LEADING, *_TRAILING)]
        fields = (*_LEADING, *rest, *_TRAILING)
    # the library keeps what it does not know, behind the fields that it knows
    function = {field: given.get(field) for field in fields}
    return {"type": "function", "function": {**function, **given, **function}}
