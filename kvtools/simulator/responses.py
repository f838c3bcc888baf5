"""Response bodies that are no answers, as vLLM fills them, and the words of answers.

Answers are whole words, always the same for the same prompt. Clients send an answer back as text
with the next turn, when its tokens are already cached, so the text must have the same tokens again:
answers use only words of one token each.
"""

import hashlib
import json
import re
from array import array
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from kvtools.simulator.answers import Body
from kvtools.simulator.tokens import ModelTokens


class ApiError(Exception):
    """A rejected request, with the HTTP status and vLLM's name for the kind of error."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> Body:
        """Returns the error in vLLM's form."""
        return error(self.status, self.kind, str(self), self.param)


def error(status: int, kind: str, message: str, param: str | None = None) -> Body:
    """Returns the body of an OpenAI-style error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def bad_request(message: str, param: str | None = None) -> ApiError:
    """Returns the error for a client's mistake."""
    return ApiError(400, "BadRequestError", message, param)


def models(
    base: str, loras: Sequence[str], *, created: int, max_model_len: int, owner: str
) -> Body:
    """Returns the answer to GET /v1/models: the model, then its adapters as its children."""
    common = {"object": "model", "created": created, "owned_by": owner}
    data: list[Body] = [
        {"id": base, **common, "root": base, "parent": None, "max_model_len": max_model_len}
    ]
    data += [
        {"id": lora, **common, "root": lora, "parent": base, "max_model_len": None}
        for lora in loras
    ]
    return {"object": "list", "data": data}


_Body = TypeVar("_Body")


async def decoded(request: web.Request, kind: type[_Body]) -> _Body:
    """Returns the request's body as that type.

    What is no strict JSON is read as vLLM's front end reads it, by Python's json.

    Raises:
        ApiError: it cannot be decoded; the client gets this error.
    """
    body = await request.read()
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return msgspec.convert(json.loads(body), type=kind)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise bad_request(str(error)) from error


def json_response(
    body: dict[str, Any] | list[dict[str, Any]],
    *,
    status: int = 200,
    headers: dict[str, str] | None = None,
) -> web.Response:
    """Returns a response with a JSON body."""
    content = msgspec.json.encode(body)
    return web.Response(
        body=content, content_type="application/json", status=status, headers=headers
    )


_WORD = re.compile(r" ?[a-z]{2,}")
_SHORTEST_ANSWER = 16
_ANSWER_LENGTHS = 112


class AnswerWriter:
    """Chooses the tokens of answers for one tokenizer."""

    def __init__(self, tokens: ModelTokens) -> None:
        self._tokens = tokens
        words = _words(tokens)
        self._first_on_line = [token for token, text in words if not text.startswith(" ")]
        self._continuations = [token for token, text in words if text.startswith(" ")]
        if not (self._first_on_line and self._continuations):
            raise ValueError("the tokenizer has no whole words to say")

    def seed(self, prompt: Sequence[int], choice: int) -> bytes:
        """Returns the seed of an answer; `choice` distinguishes the answers to one prompt."""
        return hashlib.sha256(array("Q", [choice, *prompt]).tobytes()).digest()

    def length(self, seed: bytes) -> int:
        """Returns the tokens of an answer without a limit, including the end-of-turn token."""
        return _SHORTEST_ANSWER + _pick(seed, -1, _ANSWER_LENGTHS)

    def token(self, seed: bytes, position: int, previous: int) -> int:
        """Returns the answer's token number `position`, after the token `previous`."""
        # A word joined to the prompt's last word would be tokenized differently when sent back;
        # after a line break, the space would be.
        starts_line = self._tokens.text_of([previous]).endswith("\n")
        words = self._first_on_line if starts_line else self._continuations
        return words[_pick(seed, position, len(words))]


def _words(tokens: ModelTokens) -> list[tuple[int, str]]:
    texts = [(token, tokens.text_of([token])) for token in range(tokens.size)]
    candidates = [(token, text) for token, text in texts if _WORD.fullmatch(text)]
    encoded = tokens.of_texts([text for _, text in candidates])
    return [word for word, ids in zip(candidates, encoded, strict=True) if ids == [word[0]]]


def _pick(seed: bytes, position: int, choices: int) -> int:
    digest = hashlib.sha256(seed + position.to_bytes(8, "big", signed=True)).digest()
    return int.from_bytes(digest[:8], "big") % choices
