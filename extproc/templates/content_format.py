"""Whether a chat template takes message contents apart itself, or expects them as text.

vLLM finds it out from the template's syntax tree, and gives the template parts or text accordingly.
Source: its detection in 0.10.2 to 0.19.1, 0.24.0 and 0.32.0, told here by their outcome.
"""

from collections.abc import Callable, Iterable

from jinja2 import nodes


class _UntrackedError(Exception):
    """A name is bound in a way that the engine does not follow; it then assumes text."""


def content_formats(tree: nodes.Template) -> frozenset[bool]:
    """What the releases find: True, the template takes parts; False, it expects text."""
    return frozenset(_finds_parts(rule, tree) for rule in (_oldest, _newer, _newest))


def _finds_parts(rule: Callable[[nodes.Template, set[str]], bool], tree: nodes.Template) -> bool:
    try:
        return rule(tree, _loop_names(tree, _aliases(tree, "messages")))
    except _UntrackedError:
        return False


def _oldest(tree: nodes.Template, items: set[str]) -> bool:
    return any(_over_content(loop, items) for loop in tree.find_all(nodes.For))


def _newer(tree: nodes.Template, items: set[str]) -> bool:
    """From 0.24: a loop over any `content` counts too."""
    loops = tree.find_all(nodes.For)
    return any(_over_content(loop, items) or _over(loop, {"content"}) for loop in loops)


def _newest(tree: nodes.Template, items: set[str]) -> bool:
    """From 0.32: within macros only if the macro is called with the content of a message."""
    parameters: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        given = _given_content(tree, macro, items)
        for loop in macro.find_all(nodes.For):
            parameters[id(loop)] = given or parameters.get(id(loop), set())
    return any(
        _over_content(loop, items) or _over(loop, parameters.get(id(loop), {"content"}))
        for loop in tree.find_all(nodes.For)
    )


def _given_content(tree: nodes.Template, macro: nodes.Macro, items: set[str]) -> set[str]:
    """The parameters of a macro that somewhere get the content of a message."""
    names = [argument.name for argument in macro.args]
    given = set()
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            by_place = zip(names, call.args, strict=False)
            by_name = ((pair.key, pair.value) for pair in call.kwargs if pair.key in names)
            for name, value in (*by_place, *by_name):
                if any(_reads(value, item, "content") for item in items):
                    given.add(name)
    return given


def _aliases(tree: nodes.Template, name: str) -> set[str]:
    """A name and all that the template assigns it, or a slice or filtering of it, to."""
    known = {name}
    pending = [name]
    while pending:
        source = pending.pop()
        for assignment in tree.find_all(nodes.Assign):
            if _reads(assignment.node, source):
                target = _name(assignment.target)
                if target not in known:
                    known.add(target)
                    pending.append(target)
    return known


def _loop_names(tree: nodes.Template, sources: set[str]) -> set[str]:
    """The names under which loops over these sources know an item."""
    return {
        _name(loop.target)
        for loop in tree.find_all(nodes.For)
        if any(_reads(loop.iter, source) for source in sources)
    }


def _over_content(loop: nodes.For, items: Iterable[str]) -> bool:
    return any(_reads(loop.iter, item, "content") for item in items) and bool(_name(loop.target))


def _over(loop: nodes.For, names: set[str]) -> bool:
    is_one = isinstance(loop.iter, nodes.Name) and loop.iter.name in names
    return is_one and bool(_name(loop.target))


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _UntrackedError
    return target.name


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Whether an expression is a variable, or a key of it, perhaps filtered, tested or sliced."""
    while True:
        match node:
            case nodes.Filter() | nodes.Test():
                node = node.node
            case nodes.Getitem(arg=nodes.Slice()):
                node = node.node
            case _:
                break
    if key is not None:
        match node:
            case nodes.Getitem(arg=nodes.Const(value=value)) if value == key:
                node = node.node
            case nodes.Getattr(attr=attr) if attr == key:
                node = node.node
            case _:
                return False
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
