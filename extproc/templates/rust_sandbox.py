"""Runs a chat template as minijinja does, where that differs from Jinja.

vLLM's Rust front end renders by minijinja. A template runs here in Jinja's sandbox all the same,
with what differs and chat templates use: how values are written, keys before methods, which tests,
filters and methods there are, and what white space is. What minijinja lacks fails here too.

Source: minijinja 2.24.0 (value/mod.rs, defaults.rs, filters.rs, tests.rs), minijinja-contrib 2.24.0
(pycompat.rs), and vLLM 0.33.0 (rust/src/chat/src/renderer/hf/template.rs, tojson.rs).
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from decimal import ROUND_HALF_UP, Decimal
from functools import partial
from itertools import pairwise
from math import isfinite, isnan
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from extproc.base.errors import RequestError
from extproc.templates.bounds import MAX_CHARACTERS, too_large
from extproc.templates.chat_template import Sandbox

# White space in Rust: that of Python without four control characters.
_SPACES = "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B)))
_WHITE = _SPACES + "\u2028\u2029\u202f\u205f\u3000"
_NOT_WHITE = ("\x1c", "\x1d", "\x1e", "\x1f")

# The filters and tests that minijinja has and Jinja has, too.
_FILTERS = frozenset(
    (
        "abs", "attr", "batch", "capitalize", "count", "d", "default", "dictsort", "e", "escape",
        "first", "float", "format", "groupby", "indent", "int", "items", "join", "last", "length",
        "list", "lower", "map", "max", "min", "pprint", "reject", "rejectattr", "replace",
        "reverse", "round", "safe", "select", "selectattr", "slice", "sort", "string", "sum",
        "title", "tojson", "trim", "unique", "upper",
    )
)  # fmt: skip
_TESTS = frozenset(
    (
        "!=", "<", "<=", "==", ">", ">=", "boolean", "defined", "divisibleby", "eq", "equalto",
        "escaped", "even", "false", "filter", "float", "ge", "greaterthan", "gt", "in", "integer",
        "iterable", "le", "lessthan", "lower", "lt", "mapping", "ne", "none", "number", "odd",
        "sameas", "sequence", "string", "test", "true", "undefined", "upper",
    )
)  # fmt: skip

# The methods of texts, mappings and lists that there are and that mean what Python's do.
_TEXT_METHODS = frozenset(
    ("count", "endswith", "isascii", "join", "lower", "replace", "startswith", "upper")
)
_LIST_METHODS = frozenset(("count",))

_WRITE_TEXT = "kvsteer text of rust"
_SLICE = "kvsteer slice of rust"
_EACH = "kvsteer items of rust"

# Texts in JSON, which stay as they are, and numbers with an exponent.
_EXPONENTS = re.compile(
    r'"(?:[^"\\]|\\.)*"|(?P<digits>-?\d+(?:\.\d+)?)e(?P<sign>[+-])(?P<exponent>\d+)'
)

# Before the name of a method in a template's syntax tree.
_CALLED = "0_called "

# How Rust writes characters of a text within a list or an object.
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\0": "\\0"}


def text_of(value: Any) -> str:
    """Returns what minijinja writes of a value.

    Raises:
        RequestError: it is not known.
    """
    if type(value) is str:
        return value
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        return _float(value)
    if isinstance(value, list | tuple | Mapping):
        return _inner(value)
    if isinstance(value, Namespace):
        raise RequestError("unsupported_content")
    return str(value)


def _inner(value: Any) -> str:
    """Returns what is written of a value within a list or an object."""
    if isinstance(value, str):
        return f'"{"".join(map(_escaped, value))}"'
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inner, value))}]"
    if isinstance(value, Mapping):
        pairs = (f"{_inner(key)}: {_inner(one)}" for key, one in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, float) and value and not 1e-4 <= abs(value) < 1e16:
        return _with_exponent(value)
    if isinstance(value, jinja2.Undefined):
        return "undefined"
    return text_of(value)


def _escaped(character: str) -> str:
    known = _ESCAPES.get(character)
    if known is not None:
        return known
    if character < " " or character == "\x7f":
        return f"\\u{{{ord(character):x}}}"
    if character <= "~":
        return character
    if not character.isprintable() or unicodedata.category(character).startswith("M"):
        raise RequestError("unsupported_content")  # Rust's own tables decide
    return character


def _float(value: float) -> str:
    if not isfinite(value):
        return "NaN" if isnan(value) else str(value)
    written = format(Decimal(repr(value)), "f")
    return written if "." in written else f"{written}.0"


def _with_exponent(value: float) -> str:
    """Returns a float as Rust writes very large and small ones: `1e-7`, `1.5e20`."""
    sign, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    assert isinstance(exponent, int)
    first, *rest = map(str, digits)
    point = f".{''.join(rest)}" if rest else ""
    return f"{'-' if sign else ''}{first}{point}e{exponent + len(rest)}"


def _tojson(
    value: object,
    *,
    ensure_ascii: bool | None = False,
    indent: int | str | None = None,
    separators: Any = None,
    sort_keys: bool | None = False,
) -> str:
    if isinstance(value, jinja2.Undefined):
        value = None
    if isinstance(indent, bool):
        indent = int(indent)
    written = json.dumps(
        value,
        ensure_ascii=bool(ensure_ascii),
        indent=indent,
        separators=None if separators is None else tuple(separators),
        sort_keys=bool(sort_keys),
        default=_null,
    )
    return _EXPONENTS.sub(_as_serde_does, written) if _has_exponent(value) else written


def _null(value: object) -> None:
    if not isinstance(value, jinja2.Undefined):
        raise TypeError


def _has_exponent(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_exponent, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_exponent, value))
    return isinstance(value, float) and "e" in repr(value)


def _as_serde_does(found: re.Match[str]) -> str:
    """Returns a number without the zero of its exponent, or without that if it is -5."""
    digits, sign, exponent = found["digits"], found["sign"], found["exponent"]
    if digits is None:  # a text
        return found[0]
    if sign == "-" and int(exponent) == 5:
        return format(Decimal(found[0]), "f")
    return f"{digits}e{sign}{int(exponent)}"


def _trim(value: object, chars: str | None = None) -> str:
    return _strip(text_of(value), chars)


def _strip(text: str, chars: str | None = None) -> str:
    return text.strip(_WHITE if chars is None else chars)


def _lstrip(text: str, chars: str | None = None) -> str:
    return text.lstrip(_WHITE if chars is None else chars)


def _rstrip(text: str, chars: str | None = None) -> str:
    return text.rstrip(_WHITE if chars is None else chars)


def _split(text: str, separator: str | None = None, most: int | None = None) -> list[str]:
    most = -1 if most is None else most
    if separator is None:
        if any(one in text for one in _NOT_WHITE) or most >= 0:
            raise RequestError("unsupported_content")
        return text.split()
    if not separator:
        raise RequestError("unsupported_content")
    return text.split(separator, most)


def _splitlines(text: str, keeps: bool | None = False) -> list[str]:
    lines = text.split("\n")
    if keeps:
        return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])
    kept = lines[:-1] if not lines[-1] else lines
    return [line.removesuffix("\r") for line in kept]


def _title(text: str) -> str:
    if not text.isascii():
        raise RequestError("unsupported_content")
    before = f" {text}"
    return "".join(
        after.lower() if last.isalnum() else after.upper() for last, after in pairwise(before)
    )


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:].lower()


def _format(text: str, *values: Any) -> str:
    pieces = text.split("{}")
    if len(pieces) != len(values) + 1 or any("{" in one or "}" in one for one in pieces):
        raise RequestError("unsupported_content")
    written = [text_of(one) for one in values]
    if len(text) + sum(map(len, written)) > MAX_CHARACTERS:
        raise too_large()
    return "".join([pieces[0], *(a + b for a, b in zip(written, pieces[1:], strict=True))])


def _find(text: str, part: str) -> int:
    at = text.find(part)
    return at if at < 0 else len(text[:at].encode())


def _rfind(text: str, part: str) -> int:
    at = text.rfind(part)
    return at if at < 0 else len(text[:at].encode())


def _isspace(text: str) -> bool:
    return not _strip(text)


def _isupper(text: str) -> bool:
    return all(map(str.isupper, text))


def _islower(text: str) -> bool:
    return all(map(str.islower, text))


def _isdigit(text: str) -> bool:
    if not text.isascii():
        raise RequestError("unsupported_content")
    return not text or text.isdigit()


_OWN_METHODS: Mapping[str, Callable[..., Any]] = {
    "capitalize": _capitalize,
    "find": _find,
    "format": _format,
    "isdigit": _isdigit,
    "isnumeric": _isdigit,
    "islower": _islower,
    "isspace": _isspace,
    "isupper": _isupper,
    "lstrip": _lstrip,
    "rfind": _rfind,
    "rstrip": _rstrip,
    "split": _split,
    "splitlines": _splitlines,
    "strip": _strip,
    "title": _title,
}


def _indent(
    value: object,
    width: int | None = None,
    first: bool | None = None,
    blank: bool | None = None,
) -> str:
    """Indents lines; unlike Jinja, it drops one end of line behind the text."""
    text = text_of(value)
    margin = " " * min(4 if width is None else width, MAX_CHARACTERS)
    if (text.count("\n") + 1) * len(margin) + len(text) > MAX_CHARACTERS:
        raise too_large()
    lines = _without_end(text).split("\n")
    head = [] if first else [lines.pop(0)]
    return "\n".join([*head, *(f"{margin}{one}" if one or blank else one for one in lines)])


def _without_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")


def _default(value: Any, other: Any = "", boolean: object = False) -> Any:
    is_missing = isinstance(value, jinja2.Undefined) or (boolean and not value)
    return other if is_missing else value


def _items(value: Any) -> list[tuple[Any, Any]]:
    if not isinstance(value, Mapping):
        raise SecurityError("no mapping")
    return [*value.items()]


def _missing(*_: object, **__: object) -> Any:
    raise SecurityError("minijinja has no such filter, test or function")


def _unknown(*_: object, **__: object) -> Any:
    raise RequestError("unsupported_content")


def _upper(value: Any) -> str:
    return text_of(value).upper()


def _lower(value: Any) -> str:
    return text_of(value).lower()


def _reverse(value: Any) -> Any:
    if isinstance(value, str):
        return value[::-1]
    return LazyList(value if isinstance(value, Mapping) else reversed(value))


def _slice(value: Any, start: int | None, stop: int | None, step: int | None) -> Any:
    if value is None or isinstance(value, jinja2.Undefined):
        return []
    part = value[start:stop:step]
    return part if isinstance(part, str) else LazyList(part)


def _round(value: float, precision: int = 0) -> float:
    """Rounds halves away from zero."""
    if isinstance(value, int):
        return value
    raised = Decimal(value * 10.0**precision).quantize(Decimal(1), ROUND_HALF_UP)
    return float(raised) / 10.0**precision


class LazyList(list[Any]):
    """A list that is no sequence for minijinja, but something that can be iterated."""


def _get(value: Mapping[Any, Any], key: Any, default: Any = None) -> Any:
    return value.get(key, default)


_MAPPING_METHODS: Mapping[str, Callable[..., Any]] = {
    "get": _get,
    "items": lambda value: LazyList(value.items()),
    "keys": LazyList,
    "values": lambda value: LazyList(value.values()),
}


def _each(value: Any) -> Any:
    return () if value is None else value


def _is_iterable(value: object) -> bool:
    return value is None or isinstance(value, Iterable)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class RustSandbox(Sandbox):
    """The sandbox of chat templates, by the rules of minijinja."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.finalize = text_of
        for name in self.filters.keys() - _FILTERS:
            if not name.startswith("kvsteer"):
                self.filters[name] = _missing
        for name in self.tests.keys() - _TESTS:
            self.tests[name] = _missing
        bounded_join, bounded_replace = self.filters["join"], self.filters["replace"]
        self.filters |= {
            "capitalize": lambda value: _capitalize(text_of(value)),
            "d": _default,
            "default": _default,
            "e": _unknown,
            "escape": _unknown,
            "indent": _indent,
            "items": _items,
            "join": _joining(bounded_join),
            "lower": _lower,
            "pprint": _unknown,
            "replace": _replacing(bounded_replace),
            "reverse": _reverse,
            "round": _round,
            "safe": text_of,
            "string": text_of,
            "title": lambda value: _title(text_of(value)),
            "tojson": _tojson,
            "trim": _trim,
            "upper": _upper,
            _EACH: _each,
            _SLICE: _slice,
            _WRITE_TEXT: text_of,
        }
        self.tests |= {
            "integer": lambda value: type(value) is int,
            "int": lambda value: type(value) is int,
            "iterable": _is_iterable,
            "number": _is_number,
            "sequence": lambda value: type(value) in (list, tuple),
        }
        for name in ("cycler", "joiner"):
            self.globals[name] = _missing

    intercepted_binops = Sandbox.intercepted_binops | {"+"}

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Adds, too: two lists make one that is no sequence for minijinja."""
        if operator != "+":
            return super().call_binop(context, operator, left, right)
        both = left + right
        return LazyList(both) if isinstance(both, list) else both

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Returns what a value has under a name: a method only where one is called."""
        name = attribute.removeprefix(_CALLED)
        if isinstance(obj, Mapping):
            method = _MAPPING_METHODS.get(name) if name != attribute else None
            return self.getitem(obj, name) if method is None else partial(method, obj)
        if isinstance(obj, str) and name != attribute:
            own = _OWN_METHODS.get(name)
            if own is not None:
                return partial(own, obj)
            if name in _TEXT_METHODS:
                return super().getattr(obj, name)
        if isinstance(obj, list | tuple) and name != attribute and name in _LIST_METHODS:
            return super().getattr(obj, name)
        if obj is None or isinstance(obj, str | list | tuple | bool | int | float):
            return self.undefined(obj=obj, name=name)
        return super().getattr(obj, name)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Returns what a value has at a place or under a key, never a method."""
        if isinstance(obj, Mapping):
            try:
                return obj[argument]
            except (KeyError, TypeError):
                return self.undefined(obj=obj, name=argument)
        if isinstance(obj, str | list | tuple):
            is_place = type(argument) is int and -len(obj) <= argument < len(obj)
            return obj[argument] if is_place else self.undefined(obj=obj, name=argument)
        if obj is None or isinstance(obj, bool | int | float):
            return self.undefined(obj=obj, name=argument)
        return super().getitem(obj, argument)

    def compiled(self, tree: nodes.Template) -> jinja2.Template:
        """Returns a template whose `~` joins what minijinja writes of the values, and whose calls
        of a value's method are known as such.
        """
        rewritten = _Rewriter().visit(tree)
        return super().compiled(rewritten)


class _Rewriter(NodeTransformer):
    """Changes what Jinja would compile to Python's own operations, or to a search for a method."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - as Jinja names it
        self.generic_visit(node)
        node.nodes = [_filter(one, _WRITE_TEXT) for one in node.nodes]
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:  # noqa: N802 - as Jinja names it
        self.generic_visit(node)
        if isinstance(node.node, nodes.Getattr):
            node.node.attr = f"{_CALLED}{node.node.attr}"
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802 - as Jinja names it
        self.generic_visit(node)
        assert isinstance(node.iter, nodes.Expr)
        node.iter = _filter(node.iter, _EACH)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802 - as Jinja names it
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        ends = (node.arg.start, node.arg.stop, node.arg.step)
        return _filter(node.node, _SLICE, *(one or nodes.Const(None) for one in ends))


def _filter(node: nodes.Expr, name: str, *args: nodes.Expr) -> nodes.Expr:
    return nodes.Filter(node, name, [*args], [], None, None, lineno=node.lineno)


def _joining(join: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def joining(context: jinja2.runtime.Context, value: Any, separator: str = "") -> Any:
        return join(context, [text_of(one) for one in value], separator)

    return joining


def _replacing(replace: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def replacing(context: jinja2.runtime.Context, value: Any, old: Any, new: Any) -> Any:
        return replace(context, text_of(value), text_of(old), text_of(new))

    return replacing
