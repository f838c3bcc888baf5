"""Proves of a chat template that the contents of messages decide nothing: they are only written.

Then the text of a conversation depends on its roles alone, except for the contents themselves, at
places that are the same for all conversations with these roles (`skeletons`).

The proof goes through the syntax tree and gives each expression a kind. It does not follow the
order of statements: a name has one kind everywhere, the highest that anything assigns to it. What
it does not know is refused, and so is whatever depends on more than the roles, like the time. It
holds for messages that have a role and a content, which is a text, and nothing else.
"""

from collections.abc import Callable, Mapping
from enum import IntEnum
from functools import reduce
from typing import Any, ClassVar

from jinja2 import nodes


class Kind(IntEnum):
    """What an expression's value may hold; a higher kind includes the lower ones.

    CLEAN: nothing of a content. CONTENT: a content, maybe without the white space around it.
    MIXED: a text with contents in it. MESSAGE, MESSAGES: one of them, or several.
    """

    CLEAN = 0
    CONTENT = 1
    MIXED = 2
    MESSAGE = 3
    MESSAGES = 4


_TEXTS = (Kind.CLEAN, Kind.CONTENT, Kind.MIXED)

# Tests whose answer is the same for every text.
_TESTS_OF_TEXTS = frozenset(
    ("string", "defined", "undefined", "none", "mapping", "iterable", "number", "boolean")
)
_TESTS_OF_MESSAGES = frozenset(("defined", "undefined", "none", "mapping", "string"))

# Attributes of a loop that show another message, or compare values.
_LOOKS_AROUND = frozenset(("previtem", "nextitem", "changed", "cycle"))

# Filters and functions that depend on more than what they are given.
_CHANGING = frozenset(("random", "strftime_now"))

# Attributes of every dictionary, which are no keys.
_ATTRIBUTES = frozenset(dir(dict))


class _UnprovedError(Exception):
    """It is not known that contents decide nothing."""


def only_writes_contents(tree: nodes.Template) -> bool:
    """Returns whether it is proved that a template only writes the contents of messages."""
    try:
        flow = _Flow()
        before: dict[str, Kind] = {}
        while before != flow.kinds:  # until no name gets a higher kind
            before = dict(flow.kinds)
            flow.read(tree.body)
    except (_UnprovedError, RecursionError):
        return False
    return True


class _Flow:
    """The kinds of a template's names, by what was read so far."""

    def __init__(self) -> None:
        self.kinds: dict[str, Kind] = {"messages": Kind.MESSAGES}
        self._is_inside = False  # a block whose text becomes a value

    def read(self, statements: list[nodes.Node]) -> None:
        """Reads statements, and gives the names in them their kinds.

        Raises:
            _UnprovedError: one is unknown, or decides by a content.
        """
        for one in statements:
            self._statement(one)

    def _statement(self, node: nodes.Node) -> None:
        read = self._statements.get(type(node))
        if read is None:
            raise _UnprovedError
        read(self, node)

    def _output(self, node: nodes.Output) -> None:
        for one in node.nodes:
            self._write(one)

    def _if(self, node: nodes.If) -> None:
        self._clean(node.test)
        for branch in (node.body, node.elif_, node.else_):
            self.read([*branch])

    def _write(self, node: nodes.Node) -> None:
        if isinstance(node, nodes.TemplateData):
            return
        kind = self._kind(node)
        if kind not in _TEXTS or (kind and self._is_inside):
            raise _UnprovedError

    def _loop(self, node: nodes.For) -> None:
        kind = self._kind(node.iter)
        if kind not in (Kind.CLEAN, Kind.MESSAGES):
            raise _UnprovedError
        if kind is Kind.MESSAGES:
            self._name(node.target, Kind.MESSAGE)
        if node.test is not None:
            self._clean(node.test)
        self.read(node.body)
        self.read(node.else_)

    def _assign(self, target: nodes.Node, value: nodes.Node) -> None:
        match target, value:
            case nodes.Tuple(), nodes.Tuple() if len(target.items) == len(value.items):
                for name, one in zip(target.items, value.items, strict=True):
                    self._assign(name, one)
            case nodes.Name(), _:
                self._name(target, self._kind(value))
            case _:
                self._clean(value)

    def _name(self, target: nodes.Node, kind: Kind) -> None:
        """Gives a name at least this kind."""
        if kind is Kind.CLEAN:
            return
        if not isinstance(target, nodes.Name):
            raise _UnprovedError
        before = self.kinds.get(target.name, Kind.CLEAN)
        if before and (before in _TEXTS) is not (kind in _TEXTS):
            raise _UnprovedError
        if {before, kind} == {Kind.MESSAGE, Kind.MESSAGES}:
            raise _UnprovedError
        self.kinds[target.name] = max(before, kind)

    def _block(self, node: nodes.Macro | nodes.AssignBlock) -> None:
        """Reads a block whose text is a value: no content may be written there."""
        if isinstance(node, nodes.AssignBlock) and node.filter is not None:
            raise _UnprovedError
        for default in getattr(node, "defaults", ()):
            self._clean(default)
        outer, self._is_inside = self._is_inside, True
        self.read(node.body)
        self._is_inside = outer

    def _clean(self, node: nodes.Node) -> None:
        if self._kind(node):
            raise _UnprovedError

    def _kind(self, node: nodes.Node) -> Kind:
        """Returns the kind of an expression.

        Raises:
            _UnprovedError: it decides by a content, or changes from one rendering to the next.
        """
        kind_of = self._expressions.get(type(node))
        if kind_of is not None:
            return kind_of(self, node)
        for child in node.iter_child_nodes():
            self._clean(child)
        return Kind.CLEAN

    def _named(self, node: nodes.Name) -> Kind:
        if node.name in _CHANGING or node.name == "loop":
            raise _UnprovedError
        return self.kinds.get(node.name, Kind.CLEAN)

    def _part(self, owner: nodes.Node, key: object) -> Kind:
        """Returns the kind of what a value has under a key."""
        if isinstance(owner, nodes.Name) and owner.name == "loop":
            if key in _LOOKS_AROUND:
                raise _UnprovedError
            return Kind.CLEAN
        kind = self._kind(owner)
        if kind is Kind.CLEAN:
            return kind
        if kind is not Kind.MESSAGE or not isinstance(key, str) or key in _ATTRIBUTES:
            raise _UnprovedError
        return Kind.CONTENT if key == "content" else Kind.CLEAN

    def _item(self, node: nodes.Getitem) -> Kind:
        owner = self._kind(node.node)
        if isinstance(node.arg, nodes.Const) and owner is not Kind.MESSAGES:
            return self._part(node.node, node.arg.value)
        self._clean(node.arg)
        if owner is Kind.MESSAGES:
            return owner if isinstance(node.arg, nodes.Slice) else Kind.MESSAGE
        if owner:
            raise _UnprovedError
        return owner

    def _sum(self, terms: list[nodes.Expr]) -> Kind:
        kinds = [self._kind(one) for one in terms]
        if not any(kinds):
            return Kind.CLEAN
        if any(one not in _TEXTS for one in kinds):
            raise _UnprovedError
        return Kind.MIXED

    def _choice(self, node: nodes.CondExpr) -> Kind:
        self._clean(node.test)
        others = [] if node.expr2 is None else [self._kind(node.expr2)]
        kinds = {self._kind(node.expr1), *others} - {Kind.CLEAN}
        if len(kinds) > 1 and not kinds <= {*_TEXTS}:
            raise _UnprovedError
        return reduce(max, kinds, Kind.CLEAN)

    def _test(self, node: nodes.Test) -> Kind:
        kind = self._kind(node.node)
        for child in node.args:
            self._clean(child)
        known = _TESTS_OF_TEXTS if kind in _TEXTS else _TESTS_OF_MESSAGES
        if kind and node.name not in known:
            raise _UnprovedError
        return Kind.CLEAN

    def _filtered(self, node: nodes.Filter) -> Kind:
        if node.name in _CHANGING or node.node is None:
            raise _UnprovedError
        kind = self._kind(node.node)
        given = [*node.args, *node.kwargs, node.dyn_args, node.dyn_kwargs]
        for one in given:
            if one is not None:
                self._clean(one)
        if kind is Kind.CLEAN:
            return kind
        if node.name == "trim" and kind is Kind.CONTENT and not any(given):
            return kind
        if node.name in ("length", "count") and kind in (Kind.MESSAGE, Kind.MESSAGES):
            return Kind.CLEAN
        raise _UnprovedError

    def _call(self, node: nodes.Call) -> Kind:
        given = [*node.args, *node.kwargs, node.dyn_args, node.dyn_kwargs]
        for one in given:
            if one is not None:
                self._clean(one)
        if isinstance(node.node, nodes.Getattr) and node.node.attr in ("strip", "get"):
            kind = self._kind(node.node.node)
            if kind is Kind.CONTENT and node.node.attr == "strip" and not any(given):
                return kind
            if kind is Kind.MESSAGE and node.node.attr == "get":
                return self._got(node)
        self._clean(node.node)
        return Kind.CLEAN

    def _got(self, node: nodes.Call) -> Kind:
        """Returns the kind of what `get` returns of a message; its default is clean."""
        is_known = bool(node.args) and isinstance(node.args[0], nodes.Const)
        if is_known and not (node.kwargs or node.dyn_args or node.dyn_kwargs):
            return Kind.CONTENT if node.args[0].value == "content" else Kind.CLEAN  # type: ignore[attr-defined]
        raise _UnprovedError

    def _compared(self, node: nodes.Compare) -> Kind:
        """Returns the kind of a comparison, in which no content may be but as what has keys."""
        self._clean(node.expr)
        for operand in node.ops:
            is_key = operand.op in ("in", "notin") and isinstance(node.expr, nodes.Const)
            if not (is_key and self._kind(operand.expr) is Kind.MESSAGE):
                self._clean(operand.expr)
        return Kind.CLEAN

    _statements: ClassVar[Mapping[type[nodes.Node], Callable[["_Flow", Any], None]]] = {
        nodes.Output: _output,
        nodes.ExprStmt: lambda self, node: self._clean(node.node),
        nodes.If: _if,
        nodes.For: _loop,
        nodes.Assign: lambda self, node: self._assign(node.target, node.node),
        nodes.Macro: _block,
        nodes.AssignBlock: _block,
        nodes.Scope: lambda self, node: self.read(node.body),
        nodes.Break: lambda *_: None,
        nodes.Continue: lambda *_: None,
    }
    _expressions: ClassVar[Mapping[type[nodes.Node], Callable[["_Flow", Any], Kind]]] = {
        nodes.Name: _named,
        nodes.Getattr: lambda self, node: self._part(node.node, node.attr),
        nodes.Getitem: _item,
        nodes.Concat: lambda self, node: self._sum(node.nodes),
        nodes.Add: lambda self, node: self._sum([node.left, node.right]),
        nodes.CondExpr: _choice,
        nodes.Test: _test,
        nodes.Filter: _filtered,
        nodes.Call: _call,
        nodes.Compare: _compared,
    }
