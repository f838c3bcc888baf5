"""Reads tekken.json, the vocabulary of Mistral's tokenizers.

Source: mistral-common 1.13 (tokens/tokenizers/tekken.py). Control tokens have the first ids; no
text ever becomes one.
"""

import binascii
from typing import Any

import msgspec

from extproc.tokenizing.byte_pairs import MAX_TOKENS
from extproc.tokenizing.split_patterns import check_pattern
from kvstate.undecodable import UNDECODABLE

# Control tokens of files that list none; those up to version 7 may do that.
_UNLISTED = (
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)
_MAY_BE_UNLISTED = ("v1", "v2", "v3", "v7")

# Most bytes of what a conversation's settings may be; known files have some hundred.
MAX_SETTINGS_BYTES = 65_536

# Most control tokens; known files have 1,000.
MAX_CONTROLS = 8_192


class _Token(msgspec.Struct, gc=False):
    rank: int
    token_bytes: str


class _Control(msgspec.Struct, gc=False):
    rank: int
    token_str: str


class _Config(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int
    version: str


class _File(msgspec.Struct):
    config: _Config
    vocab: list[_Token]
    special_tokens: list[_Control] | None = None
    model_settings_builder: msgspec.Raw = msgspec.Raw(b"null")


_decoder = msgspec.json.Decoder(_File)


class Tekken(msgspec.Struct, frozen=True):
    """A vocabulary.

    version: of the way in which conversations are written, such as "v13". ranks: of the tokens of
    texts; their ids follow those of the control tokens. controls: the ids of control tokens that
    have a name. control_count: how many ids are those of control tokens.
    settings: what a conversation's settings may be, as the file writes it; None before version 15.
    """

    version: str
    ranks: dict[bytes, int]
    pattern: str
    controls: dict[str, int]
    control_count: int
    settings: dict[str, Any] | None = None


def read_tekken(content: bytes) -> Tekken:
    """Returns the vocabulary in a tekken.json.

    Raises:
        ValueError: it is none, or the pattern by which it cuts texts is not known.
    """
    if content.count(b'"rank"') > 2 * MAX_TOKENS:  # before they are decoded
        raise ValueError(f"more than {MAX_TOKENS} tokens")
    try:
        file = _decoder.decode(content)
    except UNDECODABLE as error:
        raise ValueError(f"no tekken.json: {error}") from None
    config = file.config
    check_pattern(config.pattern)
    count = config.default_vocab_size - config.default_num_special_tokens
    if not 0 < count <= min(len(file.vocab), MAX_TOKENS):
        raise ValueError("the sizes of its vocabulary contradict each other")
    return Tekken(
        config.version,
        _ranks(file.vocab[:count]),
        config.pattern,
        _controls(file),
        config.default_num_special_tokens,
        _settings(file.model_settings_builder),
    )


def _settings(raw: msgspec.Raw) -> dict[str, Any] | None:
    if len(memoryview(raw)) > MAX_SETTINGS_BYTES:
        raise ValueError(f"model settings of more than {MAX_SETTINGS_BYTES} bytes")
    try:
        return msgspec.json.decode(raw, type=dict[str, Any] | None)
    except UNDECODABLE:
        raise ValueError("its model settings are no object") from None


def _ranks(tokens: list[_Token]) -> dict[bytes, int]:
    ranks = {}
    for place, token in enumerate(tokens):
        try:
            text = binascii.a2b_base64(token.token_bytes, strict_mode=True)
        except ValueError:
            raise ValueError(f"token {place} is no base64") from None
        is_byte = place >= 256 or text == bytes((place,))
        if token.rank != place or text in ranks or not is_byte:
            raise ValueError(f"token {place} has another rank, is no byte, or is there twice")
        ranks[text] = place
    return ranks


def _controls(file: _File) -> dict[str, int]:
    count = file.config.default_num_special_tokens
    if file.special_tokens is None:
        if file.config.version not in _MAY_BE_UNLISTED:
            raise ValueError("it lists no control tokens")
        found = {text: place for place, text in enumerate(_UNLISTED)}
    else:
        found = {control.token_str: control.rank for control in file.special_tokens}
        if len(found) != len(file.special_tokens):
            raise ValueError("two control tokens have the same text")
    if len(found) > count or count > MAX_CONTROLS or any(one >= count for one in found.values()):
        raise ValueError("the numbers of its control tokens contradict each other")
    return found
