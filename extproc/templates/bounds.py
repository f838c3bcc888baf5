"""Bounds what single operations of a template may take: memory, and time that no tick can end.

A template is code from a model's files. Its loops check the time, but one operation can also make
a text of gigabytes, and texts and lists that contain the last one twice double with each line. So a
value that a template makes is measured where it could be used again: when it is assigned, passed
on, or put into a list. Filters and methods whose result is longer than what they are given are
measured before they run. A few have no bounded twin, or give another result each time: `lacking`
names them.

What is beyond a bound has a reason of its own, `unsupported_template`: an engine might render it.

These are bounds for each known way to grow. They do not prove that there is no other one.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.utils import Namespace, pass_context

from extproc.base.errors import RequestError

# Longest text that a template may make, and most parts of what it puts together: characters, and
# items at 128 characters each. The largest body is shorter.
MAX_CHARACTERS = 8 * 1024 * 1024
_PER_ITEM = 128
_MAX_WEIGHT = 4 * MAX_CHARACTERS

# How large a product may become: characters or items of what is repeated, bits of a number.
_MAX_PRODUCT = 1_000_000

# Largest width or precision in a format, and longest pattern of a date.
_MAX_WIDTH = 10_000
_MAX_PATTERN = 1_000

# Most texts that are joined without being measured in between.
_MAX_JOINED = 8

# How much longer than its thread works a rendering may last.
MOST_WAITS = 20

# Largest indent of JSON, and longest separators: a hundred times what is used.
_MAX_INDENT = 64
_MAX_SEPARATORS = 200

# The variable whose truth is asked for in each turn of a loop. No source can name it, since a name
# does not begin with a digit.
TICK = "0_tick"

# What Jinja adds to the arguments of calls in loops and blocks, and takes out again.
_JINJAS_OWN = frozenset(("_loop_vars", "_block_vars"))

# The filters of our own. A template may name them in `map`, which makes nothing larger.
_MEASURE = "kvsteer measure"
_MEASURE_ITEM = "kvsteer measure item"

# Filters by how many times longer than what they are given their result may be.
_GROWTH = {"forceescape": 6, "truncate": 1, "urlencode": 12, "xmlattr": 6}

# Filters that take much longer for a long text, and the longest that they get.
_SLOW = ("pprint", "striptags", "urlize", "wordwrap")
_MAX_SLOW = 65_536

# Most items with which `batch` fills up a part.
_MAX_PARTS = 100_000

# Codecs that take a time in proportion to the text.
_CODECS = frozenset(("utf-8", "utf8", "ascii", "latin-1", "latin1"))
_BYTES_METHODS = frozenset(("decode", "startswith", "endswith", "isascii"))

# What has no bounded twin: filters, globals, and methods. The first two are random in an engine.
_RANDOM_FILTER, _RANDOM_GLOBAL = "random", "lipsum"
_REFUSED_METHODS = frozenset(("to_bytes", "fromkeys", "maketrans"))

_WEIGHTLESS = frozenset((bool, int, float, type(None)))

_WIDTHS = re.compile(r"\d+")


def too_large() -> RequestError:
    """Returns the error that ends a rendering which an engine might finish."""
    return RequestError("unsupported_template")


def weight(value: object, most: int = _MAX_WEIGHT) -> int:
    """Returns about how many characters a value has as a text, each of its uses counted.

    Raises:
        RequestError: there are more than `most`, or it contains a namespace.
    """
    left = most
    pending: list[Any] = [value]
    while pending:
        one = pending.pop()
        kind = one.__class__
        if kind is str:
            left -= len(one)
        elif kind is dict:
            left -= _PER_ITEM * len(one)
            if left >= 0:
                pending += one
                pending += one.values()
        elif kind is list:
            left -= _PER_ITEM * len(one)
            if left >= 0:
                pending += one
        elif kind not in _WEIGHTLESS:
            left = _left_by(one, pending, left)
        if left < 0:
            raise too_large()
    return most - left


def _left_by(one: object, pending: list[Any], left: int) -> int:
    """Returns what is left of a weight beside a value, whose items become pending."""
    if isinstance(one, (str, bytes)):
        return left - len(one)
    if isinstance(one, Mapping):
        left -= _PER_ITEM * len(one)
        if left >= 0:
            pending.extend(one.keys())
            pending.extend(one.values())
    elif isinstance(one, (list, tuple, set, frozenset)):
        left -= _PER_ITEM * len(one)
        if left >= 0:
            pending.extend(one)
    elif isinstance(one, Namespace):
        raise too_large()
    return left


def measured(value: Any) -> Any:
    """Returns a value that a template made; a namespace is as good as any.

    Raises:
        RequestError: it is too large.
    """
    kind = value.__class__
    if kind is str:
        if len(value) > MAX_CHARACTERS:
            raise too_large()
    elif kind is not int and kind is not Namespace:
        weight(value)
    return value


def measured_item(value: Any) -> Any:
    """Returns a value that becomes part of another one; as `measured`, but no namespace."""
    weight(value)
    return value


def joined(pieces: Iterable[str]) -> str:
    """Joins what a macro or a block wrote.

    Raises:
        RequestError: it is too long.
    """
    if not isinstance(pieces, list):
        pieces = list(pieces)
    if len(pieces) > _MAX_JOINED and sum(map(len, pieces)) > MAX_CHARACTERS:
        raise too_large()
    text = "".join(pieces)
    if len(text) > MAX_CHARACTERS:
        raise too_large()
    return text


def check_product(operator: str, left: object, right: object) -> None:
    """Checks a product, a power or a formatted text before it is made.

    Raises:
        RequestError: it would be enormous.
    """
    if operator == "%":
        if isinstance(left, (str, bytes)):
            _check_format(str(left), "%", right)
    elif _product_size(operator, left, right) > _MAX_PRODUCT:
        raise too_large()


def _product_size(operator: str, left: object, right: object) -> int:
    match left, right:
        case int(), int():
            bits = left.bit_length(), right.bit_length()
            return bits[0] * abs(right) if operator == "**" else sum(bits)
        case (str() | bytes() | list() | tuple(), int()):
            return len(left) * right and max(len(left) * right, weight(left) * right)
        case (int(), str() | bytes() | list() | tuple()):
            return len(right) * left and max(len(right) * left, weight(right) * left)
    return 0


def _check_format(pattern: str, mark: str, given: object) -> None:
    if "*" in pattern or re.search(r":[^}]*\{", pattern):  # a width that is given as a value
        raise too_large()
    widths = [int(one[:9]) for one in _WIDTHS.findall(pattern)]
    if max(widths, default=0) > _MAX_WIDTH:
        raise too_large()
    if len(pattern) + pattern.count(mark) * weight(given) + sum(widths) > MAX_CHARACTERS:
        raise too_large()


def check_call(function: object, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Checks a call before it is made.

    Raises:
        RequestError: its result would be enormous.
    """
    if function.__class__ is BuiltinMethodType:
        owner, name = function.__self__, function.__name__
        if owner.__class__ is str:
            check = _METHODS.get(name)
            if check is not None:
                check(owner, args, kwargs)
        elif isinstance(owner, bytes) and name in _BYTES_METHODS:
            _check_codec("", args, kwargs)
        elif name in _REFUSED_METHODS or isinstance(owner, bytes):
            raise too_large()
    elif function is dict or function is Namespace:
        weight((args, {key: kwargs[key] for key in kwargs.keys() - _JINJAS_OWN}))
    else:  # the sandbox wraps the method
        owner = getattr(getattr(function, "__wrapped__", None), "__self__", None)
        if isinstance(owner, str):
            _check_format(owner, "{", (args, kwargs))
        markup = getattr(function, "__self__", None)
        if isinstance(markup, str):  # a method of a text that is marked as safe
            check = _METHODS.get(getattr(function, "__name__", ""))
            if check is not None:
                check(str(markup), args, kwargs)


_Check = Callable[[str, tuple[Any, ...], Mapping[str, Any]], None]


def _refuse(text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    raise too_large()


def _check_width(text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    numbers = [one for one in (*args, *kwargs.values()) if isinstance(one, int)]
    most = max(numbers, default=8)  # of expandtabs
    if most > _MAX_WIDTH or (text.count("\t") + 1) * most + len(text) > MAX_CHARACTERS:
        raise too_large()


def _check_replaced(text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    match args:
        case (str() as old, str() as new, *_) if len(new) > len(old):
            if len(text) + text.count(old) * (len(new) - len(old)) > MAX_CHARACTERS:
                raise too_large()


def _check_joined(text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    match args:
        case (list() | tuple() | dict() as parts,):
            if weight(parts) + len(parts) * len(text) > MAX_CHARACTERS + _PER_ITEM * len(parts):
                raise too_large()
        case (str() as parts,):
            if len(parts) * (1 + len(text)) > MAX_CHARACTERS:
                raise too_large()
        case _:
            raise too_large()


def _check_translated(text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    match args:
        case (dict() as table,):
            longest = max((len(one) for one in table.values() if isinstance(one, str)), default=1)
            if len(text) * longest > MAX_CHARACTERS:
                raise too_large()
        case _:
            raise too_large()


def _check_codec(text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    named = (*args, *kwargs.values())[:1]
    is_known = all(not isinstance(one, str) or one.lower() in _CODECS for one in named)
    if not is_known or len(text) * 4 > MAX_CHARACTERS:
        raise too_large()


def _check_slow(text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    if len(text) > _MAX_SLOW:
        raise too_large()


_METHODS: Mapping[str, _Check] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "expandtabs"), _check_width),
    **dict.fromkeys(("format", "format_map"), _refuse),
    "translate": _check_translated,
    "encode": _check_codec,
    "striptags": _check_slow,
    "replace": _check_replaced,
    "join": _check_joined,
}


def bound_filters(filters: dict[str, Callable[..., Any]], tojson: Callable[..., str]) -> None:
    """Replaces the filters of an environment by bounded ones."""
    original = dict(filters)

    filters[_RANDOM_FILTER] = refused
    for name, growth in _GROWTH.items():
        filters[name] = _growing(original[name], growth)
    for name in _SLOW:
        filters[name] = _growing(original[name], MAX_CHARACTERS // _MAX_SLOW)
    filters["wordwrap"] = _wrapping(filters["wordwrap"])
    filters["center"] = _center
    for name in ("batch", "slice"):
        filters[name] = _parting(_collecting(original[name]))
    for name in ("map", "select", "reject", "selectattr", "rejectattr"):
        filters[name] = _lazy(original[name])
    for name in ("list", "sum", "sort", "unique", "min", "max", "reverse", "dictsort", "groupby"):
        filters[name] = _collecting(original[name])
    filters["join"] = _join
    filters["replace"] = _replace
    filters["indent"] = _indent(original["indent"])
    filters["format"] = _format
    filters["tojson"] = _tojson(tojson)
    filters[_MEASURE] = measured
    filters[_MEASURE_ITEM] = measured_item


def refused(*args: object, **kwargs: object) -> None:
    """Stands for what is another one each time that an engine asks for it."""
    raise too_large()


def lacking(tree: nodes.Template) -> list[str]:
    """Returns what a template names and a rendering here refuses, in words."""
    filters = {f"the filter {one.name}" for one in tree.find_all(nodes.Filter)}
    names = {f"{one.name}()" for one in tree.find_all(nodes.Name)}
    methods = {one.attr for one in tree.find_all(nodes.Getattr)} & _REFUSED_METHODS
    random = {f"the filter {_RANDOM_FILTER}"} & filters | {f"{_RANDOM_GLOBAL}()"} & names
    return sorted(random | {f"the method {one}" for one in methods})


class Tick:
    """Ends a rendering that takes too long, whenever its truth is asked for.

    What counts is the time that the rendering's thread works: on a busy machine an honest template
    waits longer than it works. A limit of MOST_WAITS times as much ends what waits for ever. It is
    used by the thread that made it. The thread's clock costs a system call, so it is asked only
    after that much time has passed for everybody.

    budget_seconds: how long the thread may work. monotonic, worked: return seconds, for everybody
    and of the thread's work.
    """

    __slots__ = ("_end", "_last", "_look_at", "_monotonic", "_worked")

    def __init__(
        self,
        budget_seconds: float,
        monotonic: Callable[[], float] = time.monotonic,
        worked: Callable[[], float] = time.thread_time,
    ) -> None:
        self._monotonic, self._worked = monotonic, worked
        now = monotonic()
        self._end = worked() + budget_seconds
        self._look_at = now + budget_seconds
        self._last = now + MOST_WAITS * budget_seconds

    def __bool__(self) -> bool:
        now = self._monotonic()
        if now > self._look_at:
            left = self._end - self._worked()
            if left < 0 or now > self._last:
                raise RequestError("template_too_slow")
            self._look_at = min(now + left, self._last)
        return True


def _items(context: jinja2.runtime.Context, values: Iterable[Any]) -> Iterator[Any]:
    """Yields items as long as there is time, and as their texts are not too long in all."""
    tick, left = context.parent[TICK], _MAX_WEIGHT
    for value in values:
        bool(tick)
        left -= _PER_ITEM + (len(value) if isinstance(value, str) else weight(value))
        if left < 0:
            raise too_large()
        yield value


def _lazy(original: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def bounded(
        context: jinja2.runtime.Context,
        value: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Iterator[Any]:
        return _items(context, original(context, value, *args, **kwargs))

    return bounded


# The attribute of a context that a filter gets, by what it asks for.
_GIVEN = {"eval_context": "eval_ctx", "environment": "environment"}


def _collecting(original: Callable[..., Any]) -> Callable[..., Any]:
    call = _with_given(original)

    @pass_context
    def bounded(
        context: jinja2.runtime.Context,
        value: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if not isinstance(value, (str, Mapping)):
            value = list(_items(context, value or ()))
        if kwargs.get("start") or (original.__name__ == "sync_do_sum" and len(args) > 1):
            raise too_large()
        return call(context, value, *args, **kwargs)

    return bounded


def _with_given(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that gets a context, whatever of it the original asks for."""
    takes = jinja2.utils._PassArg.from_obj(original)  # noqa: SLF001 - as the compiler asks it
    given = None if takes is None else _GIVEN[takes.name]

    def call(context: jinja2.runtime.Context, *args: Any, **kwargs: Any) -> Any:
        if given is None:
            return original(*args, **kwargs)
        return original(getattr(context, given), *args, **kwargs)

    return call


def _growing(original: Callable[..., Any], growth: int) -> Callable[..., Any]:
    """Bounds a filter whose result is at most so many times longer than what it is given."""
    call = _with_given(original)

    @pass_context
    def bounded(context: jinja2.runtime.Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        if growth * weight((value, args, kwargs)) > MAX_CHARACTERS:
            raise too_large()
        return call(context, value, *args, **kwargs)

    return bounded


def _wrapping(original: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def bounded(context: jinja2.runtime.Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        between = max(
            (len(one) for one in (*args, *kwargs.values()) if isinstance(one, str)), default=1
        )
        if len(str(value)) * between > MAX_CHARACTERS:
            raise too_large()
        return original(context, value, *args, **kwargs)

    return bounded


@pass_context
def _center(context: jinja2.runtime.Context, value: object, width: int = 80) -> str:
    if width > _MAX_WIDTH:
        raise too_large()
    return jinja2.filters.do_center(str(value), width)


def _parting(original: Callable[..., Any]) -> Callable[..., Any]:
    @pass_context
    def bounded(
        context: jinja2.runtime.Context, value: Any, number: int, fill_with: Any = None
    ) -> Iterator[Any]:
        if fill_with is not None and number > _MAX_PARTS:
            raise too_large()
        return _items(context, original(context, value, number, fill_with))

    return bounded


@pass_context
def _join(
    context: jinja2.runtime.Context,
    value: Iterable[Any],
    d: str = "",
    attribute: str | int | None = None,
) -> str:
    if attribute is not None:
        value = context.environment.filters["map"](context, value, attribute=attribute)
    texts = [str(one) for one in _items(context, value)]
    return joined(piece for text in texts for piece in (str(d), text))[len(str(d)) :]


@pass_context
def _replace(
    context: jinja2.runtime.Context,
    value: object,
    old: str,
    new: str,
    count: int | None = None,
) -> str:
    text = str(value)
    _check_replaced(text, (str(old), str(new)), {})
    return text.replace(str(old), str(new), -1 if count is None else count)


def _indent(original: Callable[..., str]) -> Callable[..., str]:
    @pass_context
    def bounded(
        context: jinja2.runtime.Context,
        s: str,
        width: int | str = 4,
        first: bool = False,
        blank: bool = False,
    ) -> str:
        size = width if isinstance(width, int) else len(width)
        if size > _MAX_WIDTH or len(s) + size * (s.count("\n") + 1) > MAX_CHARACTERS:
            raise too_large()
        return original(s, width, first, blank)

    return bounded


@pass_context
def _format(
    context: jinja2.runtime.Context,
    value: object,
    *args: object,
    **kwargs: object,
) -> str:
    _check_format(str(value), "%", (args, kwargs))
    return str(value) % (kwargs or args)


def _tojson(original: Callable[..., str]) -> Callable[..., str]:
    @pass_context
    def bounded(
        context: jinja2.runtime.Context,
        value: object,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        size = indent if isinstance(indent, int) else len(indent or "")
        if size > _MAX_INDENT or weight(separators) > _MAX_SEPARATORS + 2 * _PER_ITEM:
            raise too_large()
        return original(value, ensure_ascii, indent, separators, sort_keys)

    return bounded


def bounded_pattern(pattern: str) -> str:
    """Returns the pattern of a date.

    Raises:
        RequestError: it is too long, or has a width.
    """
    if len(pattern) > _MAX_PATTERN or re.search(r"%[^a-zA-Z%]*\d", pattern):
        raise too_large()
    return pattern


def guard(tree: nodes.Template) -> None:
    """Adds the checks of time and of values to a template's syntax tree."""
    turns: list[nodes.For | nodes.Macro | nodes.CallBlock] = [*tree.find_all(nodes.For)]
    turns += tree.find_all(nodes.Macro)
    turns += tree.find_all(nodes.CallBlock)
    uses = {name.name for name in tree.find_all(nodes.Name)}
    _wrap(tree, is_output=False)
    for node in turns:
        checks: list[nodes.Expr] = [nodes.Not(nodes.Name(TICK, "load"))]
        if not isinstance(node, nodes.For):
            rest = [name for name in ("varargs", "kwargs") if name in uses]
            checks += [_filtered(nodes.Name(name, "load"), _MEASURE_ITEM) for name in rest]
        node.body[:0] = [nodes.ExprStmt(one).set_lineno(node.lineno) for one in checks]
    tree.set_environment(tree.environment)  # type: ignore[arg-type]


def _filtered(value: Any, name: str) -> Any:
    # a filter, since the sandbox's checks of a call cost more
    return nodes.Filter(value, name, [], [], None, None).set_lineno(value.lineno or 1)


def _is_sum(node: nodes.Node) -> bool:
    return isinstance(node, (nodes.Concat, nodes.Add))


def _wrap(node: nodes.Node, *, is_output: bool) -> None:
    """Measures the sums and containers below a node, but not the sums that are written at once."""
    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            value[:] = [_wrapped(one, node, is_output=is_output) for one in value]
        elif isinstance(value, nodes.Node):
            setattr(node, name, _wrapped(value, node, is_output=is_output))


def _wrapped(one: Any, parent: nodes.Node, *, is_output: bool) -> Any:
    if not isinstance(one, nodes.Node):
        return one
    writes = isinstance(parent, nodes.Output) or (
        is_output and isinstance(parent, (nodes.CondExpr, nodes.Concat, nodes.Add))
    )
    _wrap(one, is_output=writes)
    if _is_sum(one):
        if _terms(one) > _MAX_JOINED:
            one = _in_parts(one)
        return one if writes or _is_sum(parent) else _filtered(one, _MEASURE)
    is_made = isinstance(one, (nodes.List, nodes.Dict)) or (
        isinstance(one, nodes.Tuple) and one.ctx == "load"
    )
    if is_made and not _is_constant(one) and not _is_unpacked(one, parent):
        return _filtered(one, _MEASURE_ITEM)
    return one


def _is_constant(node: nodes.Node) -> bool:
    return not any(
        isinstance(one, nodes.Expr)
        and not isinstance(one, (nodes.Const, nodes.List, nodes.Dict, nodes.Tuple))
        for one in _descendants(node)
    )


def _descendants(node: nodes.Node) -> Iterator[nodes.Node]:
    yield node
    for one in node.iter_child_nodes():
        yield from _descendants(one)


def _is_unpacked(node: nodes.Node, parent: nodes.Node) -> bool:
    """Returns whether a tuple is assigned to as many names: then it is never a value itself."""
    return (
        isinstance(parent, nodes.Assign)
        and isinstance(node, nodes.Tuple)
        and (isinstance(parent.target, nodes.Tuple))
    )


def _terms(node: nodes.Node) -> int:
    """Returns how many values that are no constants a sum joins."""
    if _is_sum(node):
        return sum(_terms(one) for one in node.iter_child_nodes())
    return 0 if isinstance(node, (nodes.Const, nodes.TemplateData)) else 1


def _in_parts(node: Any) -> Any:
    """Measures the parts of a long sum, which may all be the same long text."""
    if isinstance(node, nodes.Concat):
        some = node.nodes
        while len(some) > _MAX_JOINED:
            some = [
                _filtered(nodes.Concat(some[start : start + _MAX_JOINED]), _MEASURE)
                for start in range(0, len(some), _MAX_JOINED)
            ]
        node.nodes = some
        return node
    node.left = _filtered(node.left, _MEASURE)
    return node
