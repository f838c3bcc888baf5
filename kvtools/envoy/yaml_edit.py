"""Edits a YAML or JSON text in place: every other byte stays, comments included.

Positions come from the marks of PyYAML's parser. New text is written in the style of its
surroundings: in block style with their indentation, or in flow style, which is JSON. The result is
parsed again and compared with the same edits made to the values; if they differ, it is refused.
"""

import copy
import json
import re
from typing import Any, NamedTuple, NoReturn

import yaml

from extproc.base.errors import ConfigError

MAX_CHARACTERS = 1024 * 1024

# Most values that a text may have, with every alias replaced by its value.
MAX_NODES = 200_000

KeyPath = tuple[str | int, ...]

_PLAIN_TYPES = {f"tag:yaml.org,2002:{name}" for name in ("bool", "int", "float", "null")}
_TEXT = "tag:yaml.org,2002:str"
_MERGE = "tag:yaml.org,2002:merge"
_COLLECTIONS = {"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"}


class _Edit(NamedTuple):
    """A new text for a range; of two edits at one position, the deeper column comes first."""

    start: int
    order: int
    end: int
    text: str


class _Change(NamedTuple):
    """The same edit for the values; key: a mapping's key or a list index; old: a key to remove."""

    path: KeyPath
    key: str | int
    old: str | None
    value: Any


class _Composer(yaml.SafeLoader):
    """Composes nodes, and gives each alias its own marks."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.shared: set[int] = set()

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        event = self.peek_event()  # type: ignore[no-untyped-call] # as PyYAML's stubs have it
        node = super().compose_node(parent, index)
        if not is_alias or node is None:
            return node
        alias = copy.copy(node)
        alias.start_mark, alias.end_mark = event.start_mark, event.end_mark
        if isinstance(alias, yaml.CollectionNode):
            alias.flow_style = True  # its end mark is exact
        self.shared |= {id(node), id(alias)}
        return alias


class YamlText:
    """A text with one document, its values, and its pending edits."""

    def __init__(self, text: str, name: str) -> None:
        """Parses the text; name: the file's name, for messages.

        Raises:
            ConfigError: it is too large, not YAML, or more than one document, or has merge keys,
                duplicate keys or tags, which would make edits ambiguous.
        """
        self._text, self._name = text, name
        self._newline = "\r\n" if "\r\n" in text else "\n"
        if len(text) > MAX_CHARACTERS:
            self.refuse("", f"larger than {MAX_CHARACTERS} characters")
        try:
            composer = _Composer(_without_tabs(text))
            root = composer.get_single_node()
            self._shared = composer.shared
            self._sizes: dict[int, int] = {}
            self._value_by_node: dict[int, Any] = {}
            if root is None:
                self.refuse("", "empty")
            self._size(root)
            self.value: Any = self._value(root)
        except yaml.YAMLError as error:
            self.refuse("", f"cannot be read as YAML: {_in_a_line(error)}")
        except RecursionError:
            self.refuse("", "nested too deeply")
        self._root = root
        self._edits: list[_Edit] = []
        self._changes: list[_Change] = []

    def refuse(self, where: str, why: str) -> NoReturn:
        """Raises an error that names the file and the place in it."""
        raise ConfigError([": ".join(part for part in (self._name, where, why) if part)])

    def put(self, path: KeyPath, key: str, value: object, comment: str = "") -> None:
        """Adds a key to a mapping, or replaces its value there.

        comment: written above a key that is added in block style.
        """
        node = self._node_at(path)
        if any(found.value == key for found, _ in node.value):
            self.replace(path, key, key, value)
            return
        if node.flow_style:
            self._add_to_flow(node, f"{_json(key)}: ", value)
        else:
            column = node.value[0][0].start_mark.column
            self._add_block(_end_of(node), {key: value}, column, comment)
        self._changes.append(_Change(path, key, None, value))

    def replace(self, path: KeyPath, old: str, key: str, value: object) -> None:
        """Replaces an entry of a mapping with another one."""
        node = self._node_at(path)
        (found, there) = next(pair for pair in node.value if pair[0].value == old)
        start = found.start_mark.index
        if node.flow_style:
            text = f"{_json(key)}: {self._flow(value, start)}"
        else:
            text = _block({key: value}, found.start_mark.column).strip()
        end = max(_end_of(there).index, found.end_mark.index + 1)
        if not node.flow_style:  # a comment at the end of the removed entry is removed too
            comment = re.compile(r"[ \t]*#.*").match(self._text, end)
            end = comment.end() if comment else end
        self._edit(start, end, text, 0)
        self._changes.append(_Change(path, key, old, value))

    def insert(self, path: KeyPath, place: int, value: object, comment: str = "") -> None:
        """Inserts an item into a list, before the item at this index or at the end.

        comment: written above it in block style.
        """
        node = self._node_at(path)
        is_last = place == len(node.value)
        if node.flow_style and is_last:
            self._add_to_flow(node, "", value)
        elif node.flow_style:
            start = node.value[place].start_mark.index
            separator = ",\n" + self._alone_before(start) if self._alone_before(start) else ", "
            self._edit(start, start, self._flow(value, start) + separator, 0)
        else:
            line, column = self._dash_of(node.value[min(place, len(node.value) - 1)])
            if is_last:
                self._add_block(_end_of(node), [value], column, comment)
            else:
                start = self._above_comments(line, column)
                self._edit(start, start, _block([value], column, comment), -column)
        self._changes.append(_Change(path, place, None, value))

    def edited(self) -> str:
        """Returns the text with all edits.

        Raises:
            ConfigError: the edits would have changed something else in this text.
        """
        parts, last = [], 0
        for edit in sorted(self._edits, key=lambda one: (one.start, one.order)):
            parts += [self._text[last : edit.start], edit.text]
            last = edit.end
        text = "".join([*parts, self._text[last:]])
        try:
            is_right = YamlText(text, self._name).value == self._changed()
        except (ConfigError, RecursionError):
            is_right = False
        if not is_right:
            self.refuse("", "is written in a form that cannot be edited safely")
        return text

    def _changed(self) -> Any:
        """Returns the values with all edits; inserts last, from the back of each list."""
        value = copy.deepcopy(self.value)
        puts = [one for one in self._changes if isinstance(one.key, str)]
        inserts = [one for one in self._changes if isinstance(one.key, int)]
        inserts.sort(key=lambda one: (len(one.path), int(one.key)), reverse=True)
        for change in (*puts, *inserts):
            there = value
            for step in change.path:
                there = there[step]
            if isinstance(change.key, int):
                there.insert(change.key, change.value)
                continue
            if change.old is not None:
                there.pop(change.old)
            there[change.key] = change.value
        return value

    def _node_at(self, path: KeyPath) -> Any:
        """Returns the node at a path.

        Raises:
            ConfigError: aliases use it in several places.
        """
        node: Any = self._root
        for number in range(len(path) + 1):
            if id(node) in self._shared:
                where = ".".join(map(str, path[:number]))
                self.refuse(
                    where, "is used in several places by an anchor (&); write it out at each"
                )
            if number < len(path):
                step = path[number]
                pairs = node.value
                node = pairs[step] if isinstance(step, int) else _value_of(pairs, step)
        return node

    def _add_to_flow(self, node: Any, key: str, value: object) -> None:
        last = node.value[-1] if node.value else None
        if last is None:
            at = node.end_mark.index - 1  # before the bracket
            is_first = not any(one.start == at for one in self._edits)
            text = key + self._flow(value, at)
            self._edit(at, at, text if is_first else f", {text}", 0)
            return
        first, end = (last, last) if isinstance(last, yaml.Node) else last
        start, at = first.start_mark.index, end.end_mark.index
        alone = self._alone_before(start)
        separator = f",\n{alone}" if alone else ", "
        self._edit(at, at, separator + key + self._flow(value, start), 0)

    def _add_block(self, end: yaml.Mark, value: object, column: int, comment: str) -> None:
        """Adds lines after the line of a position."""
        index = end.index
        line = self._text.rfind("\n", 0, index) + 1
        if self._text[line:index].strip():
            found = self._text.find("\n", index)
            line = len(self._text) if found < 0 else found + 1
        text = _block(value, column, comment)
        if line == len(self._text) and not self._text.endswith("\n"):
            text = "\n" + text.removesuffix("\n")
        self._edit(line, line, text, -column)

    def _edit(self, start: int, end: int, text: str, order: int) -> None:
        self._edits.append(_Edit(start, order, end, text.replace("\n", self._newline)))

    def _flow(self, value: object, at: int) -> str:
        """Returns JSON, on several lines if the text at an index begins a line."""
        alone = self._alone_before(at)
        if not alone:
            return _json(value)
        step: str | int = "\t" if "\t" in alone else 2
        return _json(value, step).replace("\n", f"\n{alone}")

    def _alone_before(self, index: int) -> str:
        """Returns the indentation of the text at an index, empty if it does not begin a line."""
        before = self._text[self._text.rfind("\n", 0, index) + 1 : index]
        return "" if before.strip() else before

    def _dash_of(self, item: Any) -> tuple[int, int]:
        """Returns the start of an item's line, and the column of its dash."""
        index = item.start_mark.index
        line = self._text.rfind("\n", 0, index) + 1
        dash = re.fullmatch(r"( *)- +", self._text[line:index])
        if dash is None:
            self.refuse(f"line {item.start_mark.line + 1}", "a list is written in an unusual form")
        return line, len(dash[1])

    def _above_comments(self, line: int, column: int) -> int:
        """Returns the start of the comments right above a line."""
        while line:
            above = self._text.rfind("\n", 0, line - 1) + 1
            if not self._text[above:line].startswith(" " * column + "#"):
                break
            line = above
        return line

    def _size(self, node: yaml.Node) -> int:
        """Counts a node and everything in it, with aliases replaced; refuses cycles."""
        found = self._sizes.get(id(node.value))
        if isinstance(node, yaml.CollectionNode):
            if found == 0:
                self.refuse("", "an anchor contains itself")
            if found is None:
                self._sizes[id(node.value)] = 0  # under way
                found = 1 + sum(map(self._size, _children(node)))
                self._sizes[id(node.value)] = found
        size = found or 1
        if size > MAX_NODES:
            self.refuse("", f"more than {MAX_NODES} values")
        return size

    def _value(self, node: yaml.Node) -> object:
        """Returns the values of a node; values of types that Envoy does not know stay text."""
        where = f"line {node.start_mark.line + 1}"
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, where)
        if node.tag not in _COLLECTIONS:
            self.refuse(where, f"has the tag {node.tag}")
        if id(node.value) in self._value_by_node:
            return self._value_by_node[id(node.value)]
        value: Any
        if isinstance(node, yaml.MappingNode):
            value = {}
            for key, one in node.value:
                if key.tag == _MERGE:
                    self.refuse(where, "merge keys (<<) cannot be edited; write them out")
                if not isinstance(key, yaml.ScalarNode):
                    self.refuse(where, "a key that is not text")
                if key.value in value:
                    self.refuse(where, f"has the key {key.value[:80]!r} twice")
                value[key.value] = self._value(one)
        else:
            value = [self._value(one) for one in _children(node)]
        self._value_by_node[id(node.value)] = value
        return value

    def _scalar(self, node: yaml.ScalarNode, where: str) -> object:
        if node.tag not in {_TEXT, *_PLAIN_TYPES} and not node.tag.startswith("tag:yaml.org,2002:"):
            self.refuse(where, f"has the tag {node.tag}")
        text = str(node.value)
        if node.tag not in _PLAIN_TYPES or text.lower().lstrip("+-") == ".nan":
            return text
        try:
            value: object = yaml.constructor.SafeConstructor().construct_object(node)
        except (ValueError, yaml.YAMLError):
            return text
        return value


def _without_tabs(text: str) -> str:
    """Returns JSON with its tabs, which YAML refuses, as spaces; other texts unchanged."""
    if "\t" not in text:
        return text
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text.replace("\t", " ")


def _in_a_line(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
    mark = getattr(error, "problem_mark", None)
    return f"{problem} (line {mark.line + 1})" if mark else str(problem)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [one for pair in node.value for one in pair]
    return list(node.value)


def _value_of(pairs: list[tuple[yaml.Node, yaml.Node]], key: str) -> yaml.Node:
    return next(value for found, value in pairs if found.value == key)


def _end_of(node: Any) -> yaml.Mark:
    """Returns the end of the last value in a node: a block's own mark is after later comments."""
    while isinstance(node, yaml.CollectionNode) and not node.flow_style:
        node = _children(node)[-1]
    end: yaml.Mark = node.end_mark
    return end


def _block(value: object, column: int, comment: str = "") -> str:
    dumped = yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=1_000_000)
    lines = [f"# {comment}"] * bool(comment) + dumped.splitlines()
    return "".join(f"{' ' * column}{line}\n" for line in lines)


# Characters that JSON strings may contain, but YAML may not (YAML 1.1, 5.1: c-printable).
_UNPRINTABLE = re.compile("[\x7f-\x84\x86-\x9f\ufffe\uffff]")


def _json(value: object, indent: int | str | None = None) -> str:
    """Returns a value as JSON that is also YAML."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
