"""The prompts and options of a request, independent of its API."""

import re
from array import array
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from extproc.base.errors import RequestError
from extproc.requests.dialect import Dialect, Effort
from kvstate.overlap import Tokens

# Longer conversations and lists are not keyed: every message costs template time, and every prompt
# a walk through the index.
MAX_MESSAGES = 8192
MAX_PROMPTS = 64


# What templates get besides the messages, unless a request says otherwise. Not to be changed.
USUAL_VARIABLES: dict[str, Any] = {"add_generation_prompt": True, "continue_final_message": False}

# A media part of a request: its kind, and the part as the client wrote it.
MediaPart = tuple[str, dict[str, Any]]


class Response(msgspec.Struct, frozen=True, gc=False):
    """The input of a response request, as the client sent it.

    items: a text, or items of the API. tools: an empty list if there are none.
    """

    items: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] = []


class Conversion(msgspec.Struct, frozen=True, gc=False):
    """What SGLang's own conversion leaves to the template, which decides.

    merged: the messages where the template renders no later system turn; None for the same.
    thinking: whether the request switches it on or off by the template's own argument. effort: that
    the request sets itself, "" if none.
    continued: the text of the model's last turn, which it goes on with; it is tokenized apart,
    behind the rendered messages.
    thinking_config: how it is to think, in the words of chat completions; None if it does not say.
    checks_calls: whether the engine checks that calls and results of tools belong together, for
    models for which it does that.
    """

    merged: list[dict[str, Any]] | None = None
    thinking: bool | None = None
    effort: str = ""
    continued: str = ""
    thinking_config: Any = None
    checks_calls: bool = True


class Chat(msgspec.Struct, frozen=True, gc=False):
    """A conversation, as the chat template gets it."""

    # The content of each is a text, None, or a list of parts: {"type": "text", "text": ...}, with
    # the client's other fields, and for media {"type": "image"}, "audio" or "video".
    messages: list[dict[str, Any]]
    # What templates get besides the messages, by name.
    variables: dict[str, Any]
    # Whether the tokenizer adds its special tokens to the rendered text.
    add_special_tokens: bool = False
    # The reasoning effort that the request sets, "" if none, DISABLED if it switches thinking off.
    effort: str = ""
    # What templates get of the effort, None if that is not known.
    effort_rule: Effort | None = None
    # Whether a part is not text. Only the engine's processor knows its number of tokens.
    has_media: bool = False
    # Whether releases of the engine disagree on add_special_tokens here; without a dialect, the ids
    # are certain only if the tokenizer adds no special tokens by itself.
    special_tokens_vary: bool = False
    # The rules for what releases do differently; None if there are none, so that such a
    # conversation is not keyed.
    dialect: Dialect | None = None
    # The forms under which reading the request has put it.
    forms: int = 0
    # The media parts in order, as the client wrote them.
    media: tuple[MediaPart, ...] = ()
    # How the engine is to read the media, {} for nothing.
    processor_arguments: Mapping[str, Any] = {}
    # The messages before they were parsed for templates, in the form of chat completions.
    sent: list[dict[str, Any]] = []
    # What a response request sent, None for other APIs.
    response: Response | None = None
    # Whether the request asks for the last tokens only (`InferenceRequest.keep_last_tokens`).
    is_truncated: bool = False
    # What SGLang's conversion needs besides; None for other engines.
    conversion: Conversion | None = None
    # "required" or "none", if the request has tools and says so, else "". Templates do not get it.
    tool_choice: str = ""
    # The form of the answer, as the client wrote it; None for any. Templates do not get it.
    response_format: Any = None
    # The roles of the messages, if each has only a role (user, assistant or system) and a text;
    # None otherwise, or if that is not known.
    roles: tuple[str, ...] | None = None
    # Whether the engine's own arguments for templates hold for this API.
    takes_defaults: bool = True

    @property
    def is_usual(self) -> bool:
        """Whether a template gets the messages as they are, and nothing unusual besides."""
        return (
            self.variables == USUAL_VARIABLES
            and self.takes_defaults
            and not (self.forms or self.effort)
            and (self.dialect is None or self.dialect.is_vllms)
        )


class Text(msgspec.Struct, frozen=True, gc=False):
    """A prompt of text.

    special_tokens_vary: as in Chat.
    """

    text: str
    add_special_tokens: bool = True
    special_tokens_vary: bool = False


class TokenIds(msgspec.Struct, frozen=True, gc=False):
    """Token ids that a request brings for its conversation, which the engine then does not render.

    ids: must not be changed. is_response: whether the request is a response; those of gpt-oss are
    rendered nevertheless.
    """

    ids: Tokens
    is_response: bool = False


# A prompt before tokenizing: a conversation, ids in its place, a text, or already token ids.
Prompt = Chat | TokenIds | Text | Tokens

# The effort of a request that switches thinking off: the engine's release decides what it means.
DISABLED = "disabled"

# Forms of prompts, one bit each. Each is tokenized in its own way, so one may be right while
# another is wrong. A conversation with tools is both a conversation and one with tools.
TEXT, CONVERSATION, TOOLS, SWITCHES = 1, 2, 4, 8

# Forms that releases of engines read differently (`extproc.requests.dialect`): certain only once
# they are proved.
INLINE_SYSTEM, REASONING, EFFORT, DEVELOPER = 16, 32, 64, 128
PARTS, ITEMS, FRAME, BILLING, NO_TOOLS, REBUILT = 256, 512, 1024, 2048, 4096, 8192
IN_CODE, DATE, CONVERTED, ASKED = 16384, 32768, 65536, 131072
CUT, PRINTED, EMPTY_TOOLS, EMPTIED = 262144, 524288, 1048576, 2097152
TOOL_FIELDS, TOOL_REFERENCES, LEFT_OUT, GIVEN = 4194304, 8388608, 16777216, 33554432
FRONT_END, EVEN_DAY, ODD_DAY, ROLES = 67108864, 134217728, 268435456, 536870912
BY_RELEASE = 1073741824 - 16

# By turns, so that what is proved on one day proves nothing of the next one.
DAYS = EVEN_DAY | ODD_DAY
FORM_NAMES = {
    TEXT: "texts",
    CONVERSATION: "conversations",
    TOOLS: "conversations with tools",
    SWITCHES: "conversations with template arguments",
    INLINE_SYSTEM: "messages with system turns among them",
    REASONING: "conversations with reasoning",
    EFFORT: "conversations with an effort",
    DEVELOPER: "conversations with a developer's turn",
    PARTS: "contents in parts",
    ITEMS: "responses with tools or calls",
    FRAME: "responses with special tokens",
    BILLING: "system turns with a billing header",
    NO_TOOLS: "conversations whose tools must not be used",
    REBUILT: "texts of a tokenizer that is rebuilt from other files",
    IN_CODE: "conversations that the engine renders in code",
    DATE: "conversations with a date that may be another one in the engine",
    CONVERTED: "conversations that SGLang converts in its own way",
    ASKED: "conversations that a worker tokenizes",
    CUT: "texts that some releases cut otherwise than tokenizer.json says",
    PRINTED: "responses whose tools a library prints",
    EMPTY_TOOLS: "messages with an empty list of tools",
    EMPTIED: "calls whose arguments are no JSON object",
    TOOL_FIELDS: "tools with fields that not all releases know",
    TOOL_REFERENCES: "results that name tools",
    LEFT_OUT: "requests of which some releases leave out a part",
    GIVEN: "conversations whose token ids the client sends",
    FRONT_END: "conversations that a Rust front end renders",
    EVEN_DAY: "conversations with the date of a front end's start, on even days",
    ODD_DAY: "conversations with the date of a front end's start, on odd days",
    ROLES: "conversations with roles that SGLang's own templates refuse",
}
AGREED_FORMS = TEXT | CONVERSATION | TOOLS | SWITCHES
ALL_FORMS = AGREED_FORMS | BY_RELEASE


# Why a prompt of a form is not keyed where nothing is known of the engine's dialect.
_REFUSALS = {
    INLINE_SYSTEM: "unsupported_inline_system",
    REASONING: "unsupported_reasoning",
    EFFORT: "unsupported_reasoning_effort",
    DEVELOPER: "unsupported_developer_role",
    PARTS: "unsupported_content_format",
    ITEMS: "unsupported_items",
    FRAME: "unsupported_special_tokens",
    BILLING: "unsupported_billing_line",
    NO_TOOLS: "unsupported_tool_choice",
    EMPTIED: "unsupported_tool_arguments",
    TOOL_FIELDS: "unsupported_tools",
    TOOL_REFERENCES: "unsupported_content",
    LEFT_OUT: "unsupported_content",
}


_FORMS_OF: Mapping[type, int] = {Text: TEXT, TokenIds: GIVEN}


def refusal_of(forms: int) -> str:
    """Returns why prompts of forms that releases read differently are not keyed without a dialect.

    forms: at least one of BY_RELEASE; the first one counts.
    """
    return next(reason for form, reason in _REFUSALS.items() if form & forms)


def forms_of(prompt: Prompt) -> int:
    """Returns the forms of a prompt, 0 for token ids, which need no tokenizing."""
    if not isinstance(prompt, Chat):
        return _FORMS_OF.get(type(prompt), 0)
    variables, forms = prompt.variables, prompt.forms
    others = len(variables)
    others -= ("add_generation_prompt" in variables) + ("continue_final_message" in variables)
    if not others:  # as in most requests
        return CONVERSATION | forms
    if "tools" not in variables:
        return CONVERSATION | SWITCHES | forms
    return CONVERSATION | TOOLS | (SWITCHES if others > 1 else 0) | forms


def names_of(forms: int) -> list[str]:
    """Returns the names of forms."""
    return [name for form, name in FORM_NAMES.items() if form & forms]


def forms_to_blame(forms: int) -> int:
    """Returns the forms to blame for a difference: those that releases read differently, if there
    are any; CONVERSATION and FRONT_END, which simpler requests show, only if there is no other.
    """
    common = CONVERSATION | FRONT_END
    return forms & BY_RELEASE & ~common or forms & ~common or forms


class InferenceRequest(msgspec.Struct, frozen=True, gc=False):
    """A request whose prompt can be keyed.

    model: as the client wrote it; None if it did not.
    keep_last_tokens: the engine computes only this many last tokens of every prompt; None for all.
    reads_cache: False if the engine computes the whole prompt, since the request wants the
        probabilities of its tokens; it still stores the blocks.
    answers: how many answers it wants for each prompt (`n`).
    needs_text: whether an engine that is given the ids of the prompt might answer otherwise: the
        answer repeats the prompt or goes on with it, or the request says itself where ids are.
    """

    model: str | None
    prompts: list[Prompt]
    cache_salt: str | None = None
    keep_last_tokens: int | None = None
    reads_cache: bool = True
    answers: int = 1
    needs_text: bool = False

    def truncate(self, tokens: Tokens) -> Tokens:
        """Returns the tokens of a prompt that the engine computes."""
        return tokens if self.keep_last_tokens is None else tokens[-self.keep_last_tokens :]


# A field of which only the presence matters: it is not decoded.
NULL = msgspec.Raw(b"null")
_EMPTY = (b"null", b"false", b"0", b'""', b"[]", b"{}")

# Prompts of text, one or several.
Texts = str | list[str]

# Longer lists of token ids are decoded in pieces, with a yield to other threads between them.
_PIECE_BYTES = 65_536

_LISTS = re.compile(rb'\[[ \t\r\n]*[\["]')

_text = msgspec.json.Decoder(str)
_ids = msgspec.json.Decoder(list[int])
_lists = msgspec.json.Decoder(list[msgspec.Raw])


def prompts_of(
    raw: msgspec.Raw, *, add_special_tokens: bool = True, special_tokens_vary: bool = False
) -> list[Prompt]:
    """Returns the prompts of a completion or an embedding: texts or token ids.

    Raises:
        RequestError: the only text or a list of ids is empty, an id is out of range, or there are
            too many prompts.
        msgspec.DecodeError: they are something else.
    """
    if bytes(memoryview(raw)[:2]) == b'""':
        raise RequestError("empty_prompt")
    return [
        Text(_text.decode(one), add_special_tokens, special_tokens_vary)
        if bytes(memoryview(one)[:1]) == b'"'
        else token_ids(one)
        for one in _several(raw)
    ]


def texts_of(texts: Texts) -> list[Prompt]:
    """Returns prompts of text that are tokenized with the default options.

    Raises:
        RequestError: there is none, or there are too many.
    """
    if not texts:
        raise RequestError("empty_prompt")
    several = [texts] if isinstance(texts, str) else texts
    if len(several) > MAX_PROMPTS:
        raise RequestError("too_many_prompts")
    return [Text(text) for text in several]


def ids_of(raw: msgspec.Raw) -> list[Prompt]:
    """Returns prompts of token ids from a list of ids, or a list of such lists.

    Raises:
        RequestError: one is empty, or there are too many.
        msgspec.DecodeError: they are something else.
    """
    return [token_ids(one) for one in _several(raw)]


def _several(raw: msgspec.Raw) -> list[msgspec.Raw]:
    if not _LISTS.match(memoryview(raw)):
        return [raw]
    several = _lists.decode(raw)
    if len(several) > MAX_PROMPTS:
        raise RequestError("too_many_prompts")
    return several


def is_given(field: msgspec.Raw) -> bool:
    """Returns whether a field is present and not null."""
    return bytes(memoryview(field)[:5]) != b"null"


def is_filled(field: msgspec.Raw) -> bool:
    """Returns whether a field is present, and not null, empty, false or 0."""
    return bytes(memoryview(field)[:6]) not in _EMPTY


def token_ids(raw: msgspec.Raw) -> Tokens:
    """Returns a list of token ids as a buffer.

    Raises:
        RequestError: the list is empty, or a number is out of range.
        msgspec.DecodeError: they are something else.
    """
    found = array("I")
    try:
        for piece in _pieces(raw):
            found.extend(_ids.decode(piece))
    except OverflowError:
        raise RequestError("bad_request") from None
    if not found:
        raise RequestError("empty_prompt")
    return found


def _pieces(raw: msgspec.Raw) -> Iterator[msgspec.Raw | bytes]:
    """Yields a list in pieces, each a list."""
    length = len(memoryview(raw))
    if length <= _PIECE_BYTES:
        yield raw
        return
    whole = bytes(raw)
    start = 1
    while True:
        end = whole.rfind(b",", start, start + _PIECE_BYTES)
        if end < 0 or start + _PIECE_BYTES >= length:
            break
        yield b"[%b]" % whole[start:end]
        start = end + 1
    yield b"[%b" % whole[start:]


def answers_in(n: object) -> int:
    """Returns how many answers a request's `n` asks for; 1 if no engine would accept it."""
    return n if isinstance(n, int) and not isinstance(n, bool) and n > 1 else 1


def token_limit(truncate_prompt_tokens: int | None, side: object = None) -> int | None:
    """Returns how many tokens of a prompt vLLM keeps, None for all.

    By default it truncates on the left, so the last ones are kept; only newer releases let a
    request choose the side. With -1 it keeps as many as the model accepts: only vLLM knows that.

    Raises:
        RequestError: releases differ, or only the engine knows.
    """
    if truncate_prompt_tokens is None:
        return None
    if truncate_prompt_tokens < 1 or side not in (None, "left"):
        raise RequestError("unsupported_truncation")
    return truncate_prompt_tokens
