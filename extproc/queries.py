"""From a request to what a decision is asked: its model and tokens, or what stands for these."""

from array import array
from collections.abc import Awaitable
from typing import NamedTuple

import msgspec

from extproc.errors import RequestError
from extproc.fault_log import tell_fault
from extproc.models import Models, Served
from extproc.observing.course import Course
from extproc.picking.decision import CALLS_NO_MODEL, FINDS_MODEL, MAX_TEXT_BYTES, Query
from extproc.picking.eligibility import ANY, Demand
from extproc.requests.costly_json import is_light
from extproc.requests.request import (
    ENGINES_REFUSE,
    NOT_INFERENCE,
    InferenceRequest,
    model_of,
    parse,
)
from extproc.serving.stream import UNREAD, Ask
from extproc.tokenizing.prompt_tokens import PromptTokens
from kvstate.events import Tokens
from kvstate.overlap import Prompt

# Of a body with media: they are long here and few tokens there, a thousand or two.
MEDIA_TEXT_BYTES = 8 * 1024

# How a body says that it has a salt, which keeps its prompt apart from all without the same.
_SALT = b'"cache_salt"'

# A request, and the model it is for.
Read = tuple[InferenceRequest, Served]


class Asked(NamedTuple):
    """What is to be placed; is_tokenized: here, and not by the client, who sent token ids."""

    query: Query
    is_tokenized: bool = False


class Queries:
    """Makes them of requests, whatever these are."""

    def __init__(self, models: Models, tokens: PromptTokens) -> None:
        self._models = models
        self._tokens = tokens

    def of(self, ask: Ask, course: Course) -> Asked | Awaitable[Asked]:
        """What is asked, at once where that is cheap."""
        if ask.body is None:
            return Asked(_unread(ask))
        path, body = ask.head.path, ask.body
        if not is_light(body):
            return self._large(path, body, course)
        read = self._read(path, body)
        course.parsed()
        if isinstance(read, Asked):
            return read
        return _timed(self._tokenized(*read, body), course)

    def _read(self, path: str, body: bytes) -> Read | Asked:
        """A request and the model it is for, or what is asked where it cannot be keyed."""
        try:
            request = parse(path, body)
        except RequestError as error:
            return self._unparsed(body, error.reason)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must go on
            return self.broken(error)
        served = self._models.find(request.model)
        if served is None:
            return Asked(Query(None, reason="unknown_model"))
        return request, served

    def _unparsed(self, body: bytes, reason: str) -> Asked:
        """A request that could not be read, or not in time."""
        served = self._models.find(model_of(body))
        if served is None:
            return Asked(Query(None, reason=reason, text=_text_of(body, reason)))
        # which salt it is, is not known
        return _by_text(served, body, reason, "" if _SALT in body else None)

    async def _large(self, path: str, body: bytes, course: Course) -> Asked:
        """Does all in a thread, where nobody else waits for it."""
        try:
            read, course.parsed_at = await self._tokens.apart(
                lambda: self._read_and_tokenized(path, body, course), len(body)
            )
        except TimeoutError:
            return self._unparsed(body, "deadline")
        except RequestError as error:
            return self._unparsed(body, error.reason)
        if isinstance(read, Asked):
            course.tokenized()
            return read
        tokenized = self._tokenized(*read, body)
        asked = tokenized if isinstance(tokenized, Asked) else await tokenized
        course.tokenized()
        return asked

    def _read_and_tokenized(
        self, path: str, body: bytes, course: Course
    ) -> tuple[Read | Asked, float]:
        """What is asked, or what workers are to be asked about, and when it was read."""
        read = self._read(path, body)
        parsed_at = course.now()
        if isinstance(read, Asked):
            return read, parsed_at
        request, served = read
        try:
            tokens = self._tokens.here(request, served.model)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must go on
            return self._untokenized(request, served, body, error), parsed_at
        return (read if tokens is None else _keyed(request, served, tokens)), parsed_at

    def _tokenized(
        self, request: InferenceRequest, served: Served, body: bytes
    ) -> Asked | Awaitable[Asked]:
        try:
            tokens = self._tokens.of(request, served.model, len(body))
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must go on
            return self._untokenized(request, served, body, error)
        if isinstance(tokens, list):
            return _keyed(request, served, tokens)
        return self._tokenized_later(request, served, body, tokens)

    async def _tokenized_later(
        self,
        request: InferenceRequest,
        served: Served,
        body: bytes,
        tokens: Awaitable[list[Tokens]],
    ) -> Asked:
        try:
            return _keyed(request, served, await tokens)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must go on
            return self._untokenized(request, served, body, error)

    def _untokenized(
        self, request: InferenceRequest, served: Served, body: bytes, error: Exception
    ) -> Asked:
        """A prompt whose tokens are not certain, or not there in time, is known by its text."""
        if not isinstance(error, RequestError | TimeoutError):
            return self.broken(error)
        reason = error.reason if isinstance(error, RequestError) else "deadline"
        asked = _by_text(served, body, reason, request.cache_salt)
        if request.reads_cache:
            return asked
        return Asked(msgspec.structs.replace(asked.query, reads_cache=False))

    def broken(self, error: Exception) -> Asked:
        """What is asked where something of ours failed."""
        tell_fault("decision failed with %s; the request is routed by load", error)
        return Asked(Query(self._models.default, reason="internal_error"))


def _by_text(served: Served, body: bytes, reason: str, salt: str | None) -> Asked:
    """A prompt that cannot be keyed, known by its text; salt: "" where it is some other."""
    text = _text_of(body, reason)
    demand = ANY if served.lora is None else Demand(served.lora)
    return Asked(
        Query(served.model, reason=reason, text=text, lora=served.lora, salt=salt, demand=demand)
    )


def _text_of(body: bytes, reason: str) -> bytes:
    """What a prompt that cannot be keyed is known and weighed by."""
    if reason in ENGINES_REFUSE:
        return b""
    return body[:MEDIA_TEXT_BYTES] if reason == "unsupported_media" else body


def _unread(ask: Ask) -> Query:
    """A request whose body is not known; it is a prompt where that would have been read."""
    if ask.reason == NOT_INFERENCE and not ask.wants_endpoint:
        return Query(None, reason=ask.reason, left_to_proxy=CALLS_NO_MODEL)
    if ask.reason in ("no_body", NOT_INFERENCE):
        return Query(None, reason=ask.reason)
    finds_model = FINDS_MODEL if ask.proxy_finds_model else ""
    if ask.reason not in UNREAD:
        return Query(None, reason=ask.reason, left_to_proxy=finds_model)
    length = ask.head.content_length
    return Query(
        None,
        reason=ask.reason,
        unread_bytes=MAX_TEXT_BYTES if length is None else length,
        left_to_proxy=finds_model,
    )


def _timed(asked: Asked | Awaitable[Asked], course: Course) -> Asked | Awaitable[Asked]:
    if isinstance(asked, Asked):
        course.tokenized()
        return asked
    return _timed_later(asked, course)


async def _timed_later(asked: Awaitable[Asked], course: Course) -> Asked:
    answer = await asked
    course.tokenized()
    return answer


def _keyed(request: InferenceRequest, served: Served, tokens: list[Tokens]) -> Asked:
    model, lora = served
    prompts = [Prompt(model, one, lora, request.cache_salt) for one in tokens]
    demand = ANY if lora is None else Demand(lora)
    if not request.reads_cache:
        # the prompt is known and weighed, though nothing of it will be read from what a worker has
        return Asked(Query(model, prompts, "reads_no_cache", demand=demand, reads_cache=False))
    is_tokenized = {type(prompt) for prompt in request.prompts} != {array}
    return Asked(Query(model, prompts, demand=demand, answers=request.answers), is_tokenized)
