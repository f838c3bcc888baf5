"""The sandbox in which chat templates run, and the limits on what they may take.

What templates find in it is what the transformers library (4.55 to 5.23) gives them. A template is
code from the model's files, and its input comes from clients: a loop in it that is harmless for ten
messages may not be for thousands. A rendering runs in a thread, which nobody can stop from outside,
so every turn of a loop and every call of a macro asks whether there is time left.
"""

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from extproc.errors import RequestError

# Longer texts are not keyed; a body of the largest size, printed with indented tools, stays below.
MAX_CHARACTERS = 8 * 1024 * 1024

# How large a product may become: characters or items of what is repeated, bits of a number.
_MAX_PRODUCT = 1_000_000

# The name by which the compiled template asks for its budget; no template has it.
_TICK = "kvsteer_tick_"


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with what transformers adds.

    now: what strftime_now formats; local time, as there.
    """

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        self.filters["tojson"] = _tojson
        self.filters[_TICK] = lambda tick: tick()
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda pattern: now().strftime(pattern)

    def call_binop(
        self,
        context: jinja2.runtime.Context,
        operator: str,
        left: Any,  # noqa: ANN401 - whatever a template multiplies
        right: Any,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Multiplies, unless the result would be enormous."""
        if _product_size(operator, left, right) > _MAX_PRODUCT:
            raise jinja2.exceptions.SecurityError("too large a product")
        return super().call_binop(context, operator, left, right)

    def compiled(self, tree: nodes.Template) -> jinja2.Template:
        """A template whose loops and macros ask for their budget."""
        turns: list[nodes.For | nodes.Macro] = [*tree.find_all(nodes.For)]
        turns += tree.find_all(nodes.Macro)
        for node in turns:
            # a filter, since the sandbox asks more of a call than the rest of a turn costs
            asking = nodes.Filter(nodes.Name(_TICK, "load"), _TICK, [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(asking).set_lineno(node.lineno))
        return self.from_string(tree)


class _Generation(jinja2.ext.Extension):
    """{% generation %} blocks mark what a model wrote; for a prompt they are their contents."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        """The block as a scope of its own: names set in it end with it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def rendered(
    template: jinja2.Template,
    variables: Mapping[str, Any],
    monotonic: Callable[[], float],
    end: float,
) -> str:
    """The text that a template makes of its variables.

    monotonic: seconds; at its `end` the rendering is given up.

    Raises:
        RequestError: the template refuses (template_failed), takes longer
            (template_too_slow), or writes more than is keyed (too_many_characters).
    """

    def tick() -> None:
        if monotonic() > end:
            raise RequestError("template_too_slow")

    environment = template.environment
    # as template.generate, at half the cost: that merges globals and errors' line numbers anew
    context = environment.context_class(
        environment,
        {**environment.globals, **variables, _TICK: tick},
        template.name,
        template.blocks,
    )
    pieces = []
    characters = 0
    try:
        for piece in template.root_render_func(context):
            characters += len(piece)
            if characters > MAX_CHARACTERS:
                raise RequestError("too_many_characters")
            pieces.append(piece)
    except RequestError:
        raise
    except Exception:  # noqa: BLE001 - whatever a template does, the request must go on
        raise RequestError("template_failed") from None
    return "".join(pieces)


def _product_size(operator: str, left: object, right: object) -> int:
    match left, right:
        case int(), int():
            bits = left.bit_length(), right.bit_length()
            return bits[0] * abs(right) if operator == "**" else sum(bits)
        case (str() | list() | tuple(), int()):
            return len(left) * right
        case (int(), str() | list() | tuple()):
            return len(right) * left
    return 0


def _tojson(
    value: object,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002 - the signature templates call
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
