"""Reads what the code of a Kimi checkpoint's tokenizer says, without running it.

Such a checkpoint has a vocabulary (tiktoken.model) and a Python file that loads it. The file is
parsed, not run: from its syntax tree come the pattern by which it cuts texts, how many tokens it
reserves, and what it does to a conversation before the chat template gets it.

Source: tokenization_kimi.py of Kimi K2, K2 Thinking, Kimi Linear, K2.5 and K2.6.
"""

import ast
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

# Longest file that is parsed; known ones have 12 kB. The parser takes a hundred times as much.
MAX_CODE_BYTES = 65_536

# What the file must have, so that it is the tokenizer that is known here.
_CLASS = "TikTokenTokenizer"
# It cuts texts after this many characters, and after this many that are all spaces, or all others.
MOST_AT_ONCE, MOST_ALIKE = 400_000, 25_000
_LIMITS = {"TIKTOKEN_MAX_ENCODE_CHARS": MOST_AT_ONCE, "MAX_NO_WHITESPACES_CHARS": MOST_ALIKE}

MOST_RESERVED = 8_192

# Arguments of apply_chat_template that a request sets otherwise.
_NO_SWITCHES = ("tokenize", "add_generation_prompt")


class KimiCode(NamedTuple):
    """What the code does.

    pattern: cuts texts into pieces. reserved: how many ids follow the vocabulary, for special
    tokens. sorts_tools: templates get tools with sorted keys. writes_tools: templates get them in
    TypeScript's form as well. switches: variables that templates get unless a request sets them.
    """

    pattern: str
    reserved: int
    sorts_tools: bool
    writes_tools: bool
    switches: Mapping[str, bool] = {}

    def special_tokens(self, first: int, named: object) -> dict[str, int]:
        """Returns the ids of special tokens, which follow the vocabulary.

        first: the first of them. named: `added_tokens_decoder` of tokenizer_config.json, whose
        tokens have names; the others are numbered.

        Raises:
            ValueError: it has another form.
        """
        names = dict(_names(named))
        ids = range(first, first + self.reserved)
        found = {names.get(one, f"<|reserved_token_{one}|>"): one for one in ids}
        if len(found) != len(ids) or not names.keys() <= set(ids):
            raise ValueError("tokenizer_config.json names other special tokens than there are")
        return found


def _names(named: object) -> Iterator[tuple[int, str]]:
    for written, token in named.items() if isinstance(named, dict) else ():
        match token:
            case {"content": str(content)} if _is_plain(token) and str(written).isdecimal():
                yield int(written), content
            case _:
                raise ValueError("tokenizer_config.json has special tokens of another form")


def _is_plain(token: dict[str, Any]) -> bool:
    """Returns whether a token is found whatever surrounds it, and as it is written."""
    return not any(token.get(key) for key in ("lstrip", "rstrip", "single_word", "normalized"))


def read_code(source: bytes) -> KimiCode:
    """Returns what a tokenization_kimi.py does.

    Raises:
        ValueError: it is another file, or too long.
    """
    if len(source) > MAX_CODE_BYTES:
        raise ValueError(f"more than {MAX_CODE_BYTES} bytes of code")
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("no Python code") from None
    found = [one for one in tree.body if isinstance(one, ast.ClassDef) and one.name == _CLASS]
    values = dict(_assignments(found[0])) if found else {}
    pattern, reserved = values.get("pat_str"), values.get("num_reserved_special_tokens")
    is_known = all(values.get(name) == value for name, value in _LIMITS.items())
    if not isinstance(pattern, str) or not isinstance(reserved, int) or not is_known:
        raise ValueError("its tokenizer is not the one that is known here")
    reserved += _more_reserved(found[0])
    if not 0 < reserved <= MOST_RESERVED:
        raise ValueError("it reserves too many tokens")
    names = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name)}
    return KimiCode(
        pattern,
        reserved,
        sorts_tools="deep_sort_dict" in names,
        writes_tools="encode_tools_to_typescript_style" in names,
        switches=dict(_switches(found[0])),
    )


def _switches(body: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yields the switches that the code has for templates, and how each is set."""
    for node in ast.walk(body):
        if isinstance(node, ast.FunctionDef) and node.name == "apply_chat_template":
            named, defaults = node.args.args, node.args.defaults
            for one, default in zip(reversed(named), reversed(defaults), strict=False):
                match default:
                    case ast.Constant(value=bool(value)) if one.arg not in _NO_SWITCHES:
                        yield one.arg, value


def _assignments(body: ast.AST) -> Iterator[tuple[str, object]]:
    """Yields the names that constants, and joined constants, are assigned to."""
    for node in ast.walk(body):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                yield name, value
            case ast.Assign(
                targets=[ast.Name(id=name)],
                value=ast.Call(
                    func=ast.Attribute(value=ast.Constant(value=str(between)), attr="join"),
                    args=[ast.List(elts=parts)],
                ),
            ) if all(isinstance(part, ast.Constant) for part in parts):
                yield name, between.join(str(part.value) for part in parts)  # type: ignore[attr-defined]


def _more_reserved(body: ast.AST) -> int:
    """Returns how many ids are reserved besides the number of reserved special tokens."""
    for node in ast.walk(body):
        match node:
            case ast.BinOp(
                left=ast.BinOp(right=ast.Attribute(attr="num_reserved_special_tokens")),
                op=ast.Add(),
                right=ast.Constant(value=int(more)),
            ):
                return more
    return 0
