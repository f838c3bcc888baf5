"""Golden requests: a few of every form and API, whose tokens are compared with an engine's.

They contain no user's text, so differences may be shown. A difference is reported with its first
token and its likely cause: one different byte in a template changes every block, and nothing else
would reveal it.
"""

import json
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from extproc.base.errors import RequestError
from extproc.proof.golden_added import text_with
from extproc.proof.state import Comparison, GoldenVerdict, Mismatch
from extproc.requests import chat_request, messages_request, responses_request, rust_chat
from extproc.requests.completion_request import parse_completion
from extproc.requests.dialect import Dialect
from extproc.requests.prompt import (
    CONVERSATION,
    CUT,
    DAYS,
    FORM_NAMES,
    FRONT_END,
    IN_CODE,
    SWITCHES,
    TEXT,
    TOOLS,
    Chat,
    InferenceRequest,
    Prompt,
    Text,
    TokenIds,
    forms_of,
    forms_to_blame,
)
from extproc.tokenizing.remote_tokenizer_wire import PATH, answered, question
from kvstate.overlap import Tokens, shared_tokens


class GoldenRequest(NamedTuple):
    """A golden request.

    name: in words. prompt: as KVSteer parses it. of_tokenizer: the forms of all of a tokenizer's
    texts that it shows besides. why: the cause of any difference, if it can have only one.
    """

    name: str
    prompt: Chat | TokenIds | Text
    of_tokenizer: int = 0
    why: str = ""

    @property
    def forms(self) -> int:
        """The forms that it shows."""
        return forms_of(self.prompt) | self.of_tokenizer

    def question(self, model: str | None) -> bytes:
        """Returns the body of a request to an engine for its tokens.

        model: the name by which the engine knows the model; None for the one that it serves.
        """
        assert not isinstance(self.prompt, TokenIds)  # nothing is to be tokenized
        # where releases vary, a prompt is keyed only if no special token is added in any of them
        return question(msgspec.structs.replace(self.prompt, special_tokens_vary=False), model)


# Words, numbers, spaces, code, accents, other scripts: where tokenizers differ, they differ here.
TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "    for n in range(1234567890):\n\t\treturn {'a': n ** 2}  # 3.14159\n\n",
    "naïve café, Straße, 東京 도쿄 Москва \U0001f680",
)

# Words, marks, digits, scripts, signs and spaces that any two tokenizer classes cut differently.
CUT_TEXT = (
    "I'LL say it isn't so: 1234567 \u0967\u0968\u0969 x\u00b2 H2O a_b, f(x)!=0;\r\n\n  two  spaces"
    "\t \u092e\u0947\u0930\u0940 \u0e44\u0e17\u0e22\u0e44\u0e14\u0e49 cafe\u0301 caf\u00e9"
    " \u6771\u4eac\u30bf\u30ef\u30fc42 \U0001f469\u200d\U0001f467 \ufb01n \u00bd   end \n"
)

_USER = {"role": "user", "content": TEXTS[0]}
_SYSTEM = {"role": "system", "content": "Answer briefly, in the words of the question."}
_TURN = {"role": "assistant", "content": TEXTS[2]}
_SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
_FUNCTION = {"name": "look_up", "description": "Looks a word up.", "parameters": _SCHEMA}
_TOOL = {"type": "function", "function": _FUNCTION}
_CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"word": "fox"}'},
}
_CALLED = [
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "an animal"},
]


def _switched(*, on: bool) -> Mapping[str, Any]:
    """Returns a conversation with thinking on or off, under the names that templates use for it."""
    return {"messages": [_USER], "chat_template_kwargs": {"enable_thinking": on, "thinking": on}}


_CHATS: Mapping[str, Mapping[str, Any]] = {
    "a conversation": {"messages": [_USER]},
    "a conversation with a system turn": {"messages": [_SYSTEM, _USER]},
    "a conversation of several turns": {"messages": [_USER, _TURN, _USER]},
    "a conversation with tools": {"messages": [_USER], "tools": [_TOOL]},
    "a conversation with a tool's result": {"messages": [_USER, *_CALLED], "tools": [_TOOL]},
    "a conversation that thinks": _switched(on=True),
    "a conversation that does not think": _switched(on=False),
}
_MESSAGES = {
    "system": _SYSTEM["content"],
    "messages": [_USER, _TURN, _USER],
    "tools": [
        {"name": "look_up", "description": _FUNCTION["description"], "input_schema": _SCHEMA}
    ],
}
_RESPONSE = {"instructions": _SYSTEM["content"], "input": TEXTS[0]}


def _golden(name: str, parse: Callable[[bytes], InferenceRequest], body: object) -> GoldenRequest:
    (prompt,) = parse(json.dumps(body).encode()).prompts
    assert isinstance(prompt, Chat | Text)
    return GoldenRequest(name, prompt)


# Shows how a tokenizer cuts texts; without special tokens, which are another matter.
_CUTS = GoldenRequest("a text of many kinds", Text(CUT_TEXT, add_special_tokens=False))

# The simplest ones first, since the first that differs is reported.
GOLDEN: Sequence[GoldenRequest] = (
    *(_golden(repr(text[:20]), parse_completion, {"prompt": text}) for text in TEXTS),
    _CUTS,
    *(_golden(name, chat_request.parse, body) for name, body in _CHATS.items()),
    _golden("messages (Anthropic's API)", messages_request.parse, _MESSAGES),
    _golden("a response", responses_request.parse, _RESPONSE),
)


class GoldenTokens(NamedTuple):
    """A golden request's tokens, here and in the engine; the reason in words if there are none."""

    golden: GoldenRequest
    own: Tokens | str
    engines: Tokens | str


class GoldenEncoder(Protocol):
    """KVSteer's tokenizer of a model."""

    def encode(self, prompt: Prompt) -> Tokens:
        """Returns the token ids of a prompt.

        Raises:
            RequestError: they are not certain.
        """

    def text_of(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids."""

    @property
    def text_forms(self) -> int:
        """The forms of all its texts, 0 if they are in no doubt."""

    @property
    def added_tokens(self) -> Sequence[str]:
        """The texts of its added tokens, by their ids."""

    @property
    def renders_in_code(self) -> bool:
        """Whether the engine builds the model's conversations in code, not by a template."""

    @property
    def start_forms(self) -> int:
        """The form of today's conversations where a Rust front end writes the date of its start; 0
        if it writes none.
        """

    @property
    def is_shown_by_tokenize(self) -> bool:
        """Whether the engine's POST /tokenize renders conversations as its other APIs do."""


TextOf = Callable[[Sequence[int]], str]

# Far more than an answer to any golden request takes.
MAX_ANSWER_BYTES = 64 * 1024

_OK = 200
_NO_SUCH_PATH = (404, 405, 501)
_REFUSALS = (400, 413, 422)


class TokenizerSilentError(Exception):
    """A worker gives no answer for now; the message says why."""


class NoTokenizeError(Exception):
    """A worker does not tokenize; the message says why."""


def golden_for(encoder: GoldenEncoder, dialect: Dialect) -> Sequence[GoldenRequest]:
    """Returns the golden requests of a model, for a worker that speaks a dialect.

    What engines render in code depends on the release, and so has a form of its own; so has what a
    Rust front end renders. Two texts show the forms of all the tokenizer's texts; that of its added
    tokens is also a user's.
    """
    cuts = _CUTS._replace(of_tokenizer=encoder.text_forms)
    found = [cuts if one is _CUTS else one for one in GOLDEN]
    found += _with_added(encoder)
    if dialect.is_rust and not dialect.is_foreign:
        more = IN_CODE | encoder.start_forms if encoder.renders_in_code else 0
        return [_of_rust(one, dialect, more) for one in found]
    return [_in_code(one, dialect) for one in found] if encoder.renders_in_code else found


_OTHER_TOKENS = (
    "its added tokens are others: tokenizer_config.json, added_tokens.json or"
    " special_tokens_map.json beside its tokenizer.json differ from those here, or its transformers"
    " reads them otherwise"
)


def _with_added(encoder: GoldenEncoder) -> Iterator[GoldenRequest]:
    text = text_with(encoder.added_tokens)
    if text:
        alone = Text(text, add_special_tokens=False)
        yield GoldenRequest("a text with added tokens", alone, encoder.text_forms, _OTHER_TOKENS)
        turns = {"messages": [{"role": "user", "content": text}]}
        name = "a conversation with added tokens"
        yield _golden(name, chat_request.parse, turns)._replace(why=_OTHER_TOKENS)


def _of_rust(golden: GoldenRequest, dialect: Dialect, more_forms: int) -> GoldenRequest:
    if not isinstance(golden.prompt, Chat):
        return golden
    prompt = rust_chat.in_its_terms(golden.prompt, dialect)
    prompt = msgspec.structs.replace(prompt, forms=prompt.forms | more_forms)
    return golden._replace(prompt=prompt)


def _in_code(golden: GoldenRequest, dialect: Dialect) -> GoldenRequest:
    prompt = golden.prompt
    if not isinstance(prompt, Chat):
        return golden
    forms = prompt.forms | IN_CODE
    return golden._replace(prompt=msgspec.structs.replace(prompt, dialect=dialect, forms=forms))


# Why the conversations of some models are not compared.
_NOT_SHOWN = f"the engine's {PATH} renders conversations otherwise than its other APIs"


def golden_tokens(
    encoder: GoldenEncoder,
    golden: Sequence[GoldenRequest],
    ours: Sequence[Tokens | str],
    engines: Sequence[Tokens | str],
) -> list[GoldenTokens]:
    """Returns what is known of golden requests' tokens: here, and in the engine if it shows them.

    golden: `golden_for`. ours: `own_tokens`. engines: `tokens_there`.
    """
    tokens = [GoldenTokens(*one) for one in zip(golden, ours, engines, strict=True)]
    if encoder.is_shown_by_tokenize:
        return tokens
    return [
        one._replace(engines=_NOT_SHOWN) if _is_rendered_otherwise(one.golden) else one
        for one in tokens
    ]


def _is_rendered_otherwise(golden: GoldenRequest) -> bool:
    """Returns whether a model's own code renders a golden request, and POST /tokenize does not.

    A Rust front end renders conversations alike for both. Source: vLLM 0.33.0,
    rust/src/server/src/routes/tokenize.rs.
    """
    return isinstance(golden.prompt, Chat) and not golden.forms & FRONT_END


def own_tokens(
    encoder: GoldenEncoder, golden: Sequence[GoldenRequest] = GOLDEN
) -> list[Tokens | str]:
    """Returns KVSteer's tokens of golden requests; this takes some milliseconds."""
    return [_encoded(encoder, one) for one in golden]


def _encoded(encoder: GoldenEncoder, golden: GoldenRequest) -> Tokens | str:
    try:
        return encoder.encode(golden.prompt)
    except RequestError as error:
        return error.reason


async def tokens_there(
    post: Callable[[bytes], Awaitable[tuple[int, bytes]]],
    model: str | None,
    requests: Sequence[GoldenRequest] = GOLDEN,
) -> list[Tokens | str]:
    """Returns an engine's tokens of golden requests; equal questions are asked once.

    post: sends a question to POST /tokenize, and returns the status and at most one byte more than
    MAX_ANSWER_BYTES; it raises TokenizerSilentError if there is no answer. model: as in
    `GoldenRequest.question`.

    Raises:
        TokenizerSilentError, NoTokenizeError: there is no answer at all.
    """
    found: dict[bytes, Tokens | str] = {}
    for golden in requests:
        asked = golden.question(model)
        if asked not in found:
            found[asked] = _answer(*await post(asked))
    return [found[golden.question(model)] for golden in requests]


def _answer(status: int, body: bytes) -> Tokens | str:
    """Returns the tokens in an answer, or why the engine refuses this question alone."""
    if status in _NO_SUCH_PATH:
        raise NoTokenizeError(f"it has no {PATH} (status {status})")
    if status in _REFUSALS:
        return f"{PATH}: status {status}"
    if status != _OK:
        raise TokenizerSilentError(f"{PATH}: status {status}")
    if len(body) > MAX_ANSWER_BYTES:
        raise TokenizerSilentError(f"{PATH}: an answer of more than {MAX_ANSWER_BYTES} bytes")
    try:
        return answered(body)
    except RequestError:
        raise TokenizerSilentError(f"{PATH}: an answer that cannot be read") from None


def comparison(tokens: Iterable[GoldenTokens], text_of: TextOf) -> Comparison:
    """Returns what golden requests say about an engine's tokens.

    A form is the same if one of its requests was compared and none differs. A difference is blamed
    on what simpler requests do not have; if no conversation could be compared, on all forms that
    are not known to be the same.

    text_of: returns the text of token ids, by the tokenizer here.
    """
    found: dict[int, GoldenVerdict] = {}
    compared, why, first = 0, "", None
    tokens = list(tokens)
    for golden, here, there in tokens:
        if isinstance(here, str):
            continue  # such requests are not keyed, so nothing is claimed about them
        if isinstance(there, str):
            reason = f"{golden.name} is not compared: {there}"
            why = why or reason
            _note(found, golden.forms, GoldenVerdict(None, reason))
            continue
        compared += 1
        switched = _switched_like(golden, there, tokens)
        different = mismatch(golden._replace(why=golden.why or switched), here, there, text_of)
        if different is None:
            _note(found, golden.forms, GoldenVerdict(is_same=True))
        else:
            verdict = GoldenVerdict(False, in_words(different), different)
            first = first or verdict
            _note(
                found,
                golden.forms & ~forms_to_blame(golden.forms),
                GoldenVerdict(None, verdict.reason),
            )
            _note(found, forms_to_blame(golden.forms), verdict)
    if first is not None and found.get(CONVERSATION, first).is_same is None:
        found = {form: first if one.is_same is None else one for form, one in found.items()}
    return Comparison(compared, found, why if found else "no golden request is keyed here")


_DEFAULTS = (
    "the engine's --default-chat-template-kwargs, which models[].chat_template_kwargs has to repeat"
)


def _switched_like(golden: GoldenRequest, engines: Tokens, tokens: Iterable[GoldenTokens]) -> str:
    """Returns how an engine's tokens come about, if they are ours with thinking on or off."""
    prompt = golden.prompt
    if not isinstance(prompt, Chat):
        return ""
    for other, ours, _ in tokens:
        if not isinstance(other.prompt, Chat) or not other.forms & SWITCHES:
            continue
        if other.prompt.messages == prompt.messages and ours == engines:
            return f"as of {other.name} here: by {_DEFAULTS}"
    return ""


def _note(found: dict[int, GoldenVerdict], forms: int, verdict: GoldenVerdict) -> None:
    """Adds a verdict on some forms: a difference outweighs the same, that outweighs no answer."""
    for form in FORM_NAMES:
        if form & forms:
            known = found.setdefault(form, verdict)
            if known.is_same is None or (known.is_same and verdict.is_same is False):
                found[form] = verdict


def mismatch(
    golden: GoldenRequest, ours: Tokens, engines: Tokens, text_of: TextOf
) -> Mismatch | None:
    """Returns where the tokens of a golden request first differ, None if they do not."""
    at = shared_tokens(ours, engines)
    if at == len(ours) == len(engines):
        return None
    return Mismatch(
        golden.name,
        at,
        ours[at] if at < len(ours) else None,
        engines[at] if at < len(engines) else None,
        _place_in_text(text_of(ours[max(0, at - _WINDOW) : at]))
        + cause(golden, ours, engines, text_of),
    )


def in_words(found: Mismatch, witness: str = PATH) -> str:
    """Returns a sentence about a mismatch. witness: where the engine's ids come from."""
    there = "missing" if found.engines is None else str(found.engines)
    here = "missing" if found.own is None else str(found.own)
    where = f"of {found.request}, token {found.position} is {there} in the engine and {here} here"
    return f"{where}, by {witness}: {found.cause}"


# Most characters that are shown of a text beside a mismatch, and most tokens that are turned into
# the text before it.
_SHOWN = 32
_WINDOW = 16

# Most tokens that are compared as text: no golden request has as many, but an answer may.
_MOST_TOKENS = 1_024

_DATE = re.compile(
    r"\d{4}-\d\d-\d\d|\d{1,2} \w{3,9} \d{4}|\w{3,9} \d{1,2},? \d{4}|\d{1,2}[./]\d{1,2}[./]\d{2,4}"
)


def _place_in_text(text: str) -> str:
    return f"after {text[-_SHOWN:]!r}, " if text else ""


def cause(golden: GoldenRequest, ours: Tokens, engines: Tokens, text_of: TextOf) -> str:
    """Returns the likely cause of a mismatch, in words."""
    here, there = text_of(ours[:_MOST_TOKENS]), text_of(engines[:_MOST_TOKENS])
    return (
        _of_given(golden)
        or _framed(ours, engines)
        or (golden.why and f"{_instead(here, there)}: {golden.why}")
        or _of_class(golden)
        or _of_date(golden, here, there)
        or _of_front_end(golden)
        or _of_space(here, there)
        or f"{_instead(here, there)}: {_of_form(golden, here, there)}"
    )


def _of_given(golden: GoldenRequest) -> str:
    if isinstance(golden.prompt, TokenIds):
        return "it renders the conversation and ignores the token ids that come along"
    return ""


def _of_class(golden: GoldenRequest) -> str:
    if golden.of_tokenizer & CUT:
        return "its transformers cuts texts as tokenizer_class says, not as tokenizer.json does"
    return ""


def _of_front_end(golden: GoldenRequest) -> str:
    if golden.forms & FRONT_END:
        return "the engine's Rust front end renders this template in another way than is known here"
    return ""


def _of_form(golden: GoldenRequest, here: str, there: str) -> str:
    """Returns the likely cause: what this request has and the simpler ones before it lack."""
    if golden.forms & TEXT:
        return "another tokenizer or vocabulary"
    if golden.forms & TOOLS:
        return "tools are rendered differently"
    if golden.forms & SWITCHES:
        return "the template takes enable_thinking differently"
    if here.startswith(there) or there.startswith(here):
        return f"the templates end differently, as by another generation prompt, or by {_DEFAULTS}"
    return "the chat template is another one, or the engine's front end is, such as one in Rust"


def _of_date(golden: GoldenRequest, here: str, there: str) -> str:
    if here != there and _DATE.sub("", here) == _DATE.sub("", there):
        if golden.forms & DAYS:
            return f"{_instead(here, there)}: the Rust front end writes the date of its own start"
        return "the template writes a date, and the clocks or the time zones differ"
    return ""


def _framed(ours: Tokens, engines: Tokens) -> str:
    """Returns the cause if one side only has one more token in front, else ""."""
    for longer, shorter, who, other in (
        (engines, ours, "the engine", "the router"),
        (ours, engines, "the router", "the engine"),
    ):
        if len(longer) > 1 and longer[1:] == shorter:
            if longer[0] == longer[1]:
                return f"{who} begins with its special token (BOS) twice, {other} once"
            return f"{who} puts a special token (BOS) in front, {other} does not"
    return ""


def _of_space(here: str, there: str) -> str:
    """Returns the cause if the texts differ at most in white space, else ""."""
    if here == there:
        return "the same text is cut into other tokens: another tokenizer or vocabulary"
    if here.rstrip() == there.rstrip():
        return "white space at the end differs, as a trailing newline"
    if "".join(here.split()) == "".join(there.split()):
        return "only white space differs, as a newline in the template"
    return ""


def _instead(here: str, there: str) -> str:
    """Returns what follows the common beginning of the two texts in each of them, in words."""
    both = zip(here, there, strict=False)
    end = next((at for at, (a, b) in enumerate(both) if a != b), min(len(here), len(there)))
    ours, theirs = (text[end : end + _SHOWN] for text in (here, there))
    return f"{theirs!r} in the engine and {ours!r} here"
