"""Golden requests of the forms that releases read differently: an engine renders them, or we wait.

They are asked by the worker's own dialect, of the engine's chat path itself: vLLM's
/v1/chat/completions/render (from 0.19; since 0.30 with --enable-scale-out, and then also for
messages and responses); else one token of an answer with the ids of its prompt: `return_token_ids`
of vLLM's and `return_prompt_token_ids` of SGLang 0.5.23's chat completions, and of vLLM's responses
`enable_response_messages` (0.24 and 0.32, SimpleContext in openai/responses/context.py).

No engine shows the ids of a message's prompt without /render. There the worker's own events tell:
a message that nobody sent before is asked for one token, and its blocks are looked up like those of
any request (`extproc.proof.lookups`).
"""

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from extproc.base.errors import RequestError
from extproc.proof.golden import GoldenEncoder, GoldenRequest, TextOf, in_words, mismatch
from extproc.proof.state import GoldenVerdict
from extproc.requests.dialect import Dialect, rivals_of
from extproc.requests.prompt import (
    BY_RELEASE,
    CUT,
    DAYS,
    FORM_NAMES,
    FRONT_END,
    PRINTED,
    Chat,
    Prompt,
    TokenIds,
    forms_of,
)
from extproc.requests.request import CHAT_PATH, parse
from kvstate.overlap import Tokens
from kvstate.undecodable import UNDECODABLE


class FormQuestion(NamedTuple):
    """A golden request. name: in words. path: of its API. body: without the model."""

    name: str
    path: str
    body: Mapping[str, Any]


_USER = {"role": "user", "content": "The quick brown fox jumps over the lazy dog."}
_TURN = {"role": "assistant", "content": "It does."}
_SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]}
_FUNCTION = {"name": "look_up", "description": "Looks a word up.", "parameters": _SCHEMA}
_TOOL = {"type": "function", "function": _FUNCTION}
_FUNCTION_CALL = {"name": "look_up", "arguments": "{}"}
_CALL = {"id": "c1", "type": "function", "function": _FUNCTION_CALL}
_BROKEN_CALL = {**_CALL, "function": {**_FUNCTION_CALL, "arguments": '{"word": "fo'}}
# With a field that no release knows.
_DEFERRED = {**_TOOL, "defer_loading": True, "kvsteer": {"unknown": True}}
_NAMED = {"type": "tool_reference", "name": "look_up"}
_ITEM = {"type": "message", "role": "user", "content": "Look it up."}
_TEXT = {"type": "text", "text": "Look it up.", "cache_control": {"type": "ephemeral"}}
_MESSAGES, _RESPONSES = "/v1/messages", "/v1/responses"


def _chat(name: str, *turns: Mapping[str, Any], **fields: Any) -> FormQuestion:
    return FormQuestion(name, CHAT_PATH, {"messages": list(turns), **fields})


# The simplest ones first: a difference is blamed on what they do not have.
QUESTIONS: Sequence[FormQuestion] = (
    _chat("a conversation with tools", _USER, tools=[_TOOL]),
    _chat("a conversation with content in parts", {"role": "user", "content": [_TEXT, _TEXT]}),
    _chat("a conversation with reasoning", _USER, {**_TURN, "reasoning_content": "Hm."}, _USER),
    _chat("a conversation with an effort", _USER, reasoning_effort="low"),
    _chat("a conversation with a developer", {"role": "developer", "content": "Be brief."}, _USER),
    _chat(
        "a conversation with a call",
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "an animal"},
        tools=[_TOOL],
    ),
    _chat(
        "a conversation with a call that broke off",
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [_BROKEN_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "an animal"},
        tools=[_TOOL],
    ),
    _chat(
        "a conversation with the token ids of another text",
        _USER,
        kv_transfer_params={"prompt_token_ids": [*range(11, 43)]},
    ),
    _chat("a conversation with input_ids of another text", _USER, input_ids=[*range(11, 43)]),
    _chat("tools that must not be used", _USER, tools=[_TOOL], tool_choice="none"),
    _chat("a conversation with a tool that is deferred", _USER, tools=[_DEFERRED]),
    _chat(
        "a conversation with a result that names a tool",
        _USER,
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "an animal"},
        {"role": "tool", "tool_call_id": "c1", "content": [_NAMED]},
        tools=[_TOOL],
    ),
    FormQuestion(
        "messages with an empty list of tools",
        _MESSAGES,
        {"max_tokens": 1, "messages": [_USER], "tools": []},
    ),
    FormQuestion(
        "messages with a system turn among them",
        _MESSAGES,
        {
            "max_tokens": 1,
            "system": "Be brief.",
            "messages": [_USER, {"role": "system", "content": "Be kind."}, _TURN, _USER],
        },
    ),
    FormQuestion(
        "messages with thinking",
        _MESSAGES,
        {
            "max_tokens": 1,
            "messages": [
                _USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm.", "signature": ""},
                        {"type": "text", "text": "It does."},
                    ],
                },
                _USER,
            ],
        },
    ),
    FormQuestion(
        "a response with tools and calls",
        _RESPONSES,
        {
            "instructions": "Be brief.",
            "input": [
                _ITEM,
                {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c1", "output": "an animal"},
            ],
            "tools": [{"type": "function", **_FUNCTION, "strict": False}],
        },
    ),
)


class _RenderedPrompt(Protocol):
    """A prompt that is rendered (`extproc.tokenizing.tokens.StartedPrompt`)."""

    @property
    def forms(self) -> int:
        """The forms that its dialect decided."""

    @property
    def finish(self) -> Callable[[], Tokens]:
        """Its token ids."""


class FormEncoder(GoldenEncoder, Protocol):
    """KVSteer's tokenizer of a model, which tells the forms of prompts as well."""

    def start(self, prompt: Prompt) -> _RenderedPrompt:
        """Renders a prompt.

        Raises:
            RequestError: it cannot be keyed.
        """


class OwnPrompt(NamedTuple):
    """A golden request that a release reads in its own way. forms: only those, without others."""

    question: FormQuestion
    prompt: Chat | TokenIds
    forms: int
    tokens: Tokens


def own_prompts(encoder: FormEncoder, dialect: Dialect, known: int) -> list[OwnPrompt]:
    """Returns the golden requests that are keyed in a dialect and come under a form of it.

    known: forms that need no question any more.
    """
    asked = (_own_prompt(encoder, dialect, question) for question in QUESTIONS)
    return [own for own in asked if own is not None and own.forms & ~known]


def _own_prompt(encoder: FormEncoder, dialect: Dialect, question: FormQuestion) -> OwnPrompt | None:
    """Returns a golden request in a dialect, None if it is not keyed there."""
    body = json.dumps(question.body).encode()
    try:
        (prompt,) = parse(question.path, body, lambda _: dialect).prompts
        assert isinstance(prompt, Chat | TokenIds)
        started = encoder.start(prompt)
        # they show no cuts; a front end and its date are shown by simpler requests, each time
        shown = BY_RELEASE & ~(CUT | FRONT_END | DAYS)
        forms = (forms_of(prompt) | started.forms) & shown
        return OwnPrompt(question, prompt, forms, started.finish())
    except RequestError:
        return None


# The words that a message gets for each token of a block: a word is at least one token.
_BLOCKS = 2
_MAX_WORDS = 4_096


def unseen(
    encoder: FormEncoder, dialect: Dialect, own: OwnPrompt, block_size: int, nonce: int
) -> OwnPrompt | None:
    """Returns a message like a golden one that no engine has seen, longer by two blocks or more.

    nonce: any number that is not used twice. None if it is no message, or blocks are too large.
    """
    words = _BLOCKS * block_size
    if own.question.path != _MESSAGES or words > _MAX_WORDS:
        return None
    *before, last = own.question.body["messages"]
    longer = {**last, "content": f"{last['content']} {nonce}{' word' * words}"}
    body = {**own.question.body, "messages": [*before, longer]}
    return _own_prompt(encoder, dialect, own.question._replace(body=body))


_OK = 200
_CLOSED = (403, 404, 405, 501)

# What makes an engine show the ids of a prompt, and compute no more than it must, by API.
_SHOW: Mapping[str, Mapping[str, Any]] = {
    CHAT_PATH: {
        "max_tokens": 1,
        "stream": False,
        "return_token_ids": True,
        "return_prompt_token_ids": True,
    },
    _RESPONSES: {
        "max_output_tokens": 1,
        "stream": False,
        "store": False,
        "enable_response_messages": True,
    },
}


class _Raw(msgspec.Struct):
    tokens: list[int] | None = None


class _Ids(msgspec.Struct):
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    choices: list["_Ids"] = []
    input_messages: list[_Raw] | None = None


Post = Callable[[str, bytes], Awaitable[tuple[int, bytes]]]


async def is_answered(post: Post, asked: FormQuestion, model: str) -> bool:
    """Has an engine answer a golden request; returns whether it did.

    Its arguments are those of `ids_there`.
    """
    status, _ = await post(asked.path, json.dumps({"model": model, **asked.body}).encode())
    return status == _OK


async def ids_there(post: Post, asked: FormQuestion, model: str) -> Tokens | None:
    """Returns the ids of an engine's prompt for a golden request; None if it does not show them.

    post: sends a body to a path of the engine; returns the status and the answer. model: as clients
    name it.
    """
    body = {"model": model, **asked.body}
    status, answer = await post(f"{asked.path}/render", json.dumps(body).encode())
    if status in _CLOSED and asked.path in _SHOW:
        status, answer = await post(asked.path, json.dumps({**body, **_SHOW[asked.path]}).encode())
    return _ids(answer) if status == _OK else None


def _ids(answer: bytes) -> Tokens | None:
    try:
        shown = msgspec.json.decode(answer, type=_Ids)
        of_choice = shown.choices[0].prompt_token_ids if shown.choices else None
        of_input = shown.input_messages[0].tokens if shown.input_messages else None
        ids = shown.prompt_token_ids or of_choice or of_input or shown.token_ids
        return Tokens("I", ids) if ids else None
    except (*UNDECODABLE, OverflowError):
        return None


# A golden request, and the engine's ids for it; None if it does not show them.
OwnAnswer = tuple[OwnPrompt, Tokens | None]


def rival_shown(
    encoder: FormEncoder, dialect: Dialect, results: Sequence[OwnAnswer]
) -> tuple[Dialect, Sequence[OwnAnswer]] | None:
    """Returns the dialect that a worker shows instead of the one that was tried first.

    With the same answers beside the prompts in that dialect; None if it shows no other one.
    """
    answers = {own.question.name: theirs for own, theirs in results}
    if all(
        theirs is None or own.tokens == theirs for own, theirs in results if own.forms & PRINTED
    ):
        return None
    for rival in rivals_of(dialect):
        again = [
            (own, answers.get(own.question.name)) for own in own_prompts(encoder, rival, known=0)
        ]
        shown = [own.tokens == theirs for own, theirs in again if theirs and own.forms & PRINTED]
        if shown and all(shown):
            return rival, again
    return None


def verdicts(results: Sequence[OwnAnswer], text_of: TextOf, known: int) -> dict[int, GoldenVerdict]:
    """Returns what an engine's ids say about the forms that releases read differently.

    A form is the same if a request of it was, and none of it differs. A difference is blamed on the
    forms that no other request shows to be the same. Forms of which no request was answered are
    left out. known: forms that are known to be the same.
    """
    same = known
    different: list[tuple[int, GoldenVerdict]] = []
    for own, theirs in results:
        if theirs is None:
            continue
        golden = GoldenRequest(own.question.name, own.prompt)
        found = mismatch(golden, own.tokens, theirs, text_of)
        if found is None:
            same |= own.forms
        else:
            why = in_words(found, own.question.path)
            different.append((own.forms, GoldenVerdict(False, why, found)))
    verdicts = {form: GoldenVerdict(is_same=True) for form in FORM_NAMES if form & same & ~known}
    for forms, verdict in different:
        to_blame = forms & ~same or forms
        verdicts |= {form: verdict for form in FORM_NAMES if form & to_blame}
    return verdicts
