"""From a request to what a decision is asked: its model and tokens, or what stands for these."""

from array import array
from collections.abc import Awaitable
from typing import NamedTuple

from extproc.errors import RequestError
from extproc.fault_log import tell_fault
from extproc.models import Models, Served
from extproc.observing.course import Course
from extproc.picking.decision import CALLS_NO_MODEL, FINDS_MODEL, MAX_TEXT_BYTES, Query
from extproc.picking.eligibility import ANY, Demand
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
        try:
            request = parse(ask.head.path, ask.body)
        except RequestError as error:
            served = self._models.find(model_of(ask.body))
            model = served.model if served else None
            return Asked(Query(model, reason=error.reason, text=_text_of(ask.body, error.reason)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must go on
            return self.broken(error)
        finally:
            course.parsed()
        served = self._models.find(request.model)
        if served is None:
            return Asked(Query(None, reason="unknown_model"))
        if not request.reads_cache:
            return Asked(Query(served.model, reason="reads_no_cache"))
        return _timed(self._tokenized(request, served, ask.body), course)

    def _tokenized(
        self, request: InferenceRequest, served: Served, body: bytes
    ) -> Asked | Awaitable[Asked]:
        try:
            tokens = self._tokens.of(request, served.model, len(body))
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must go on
            return self._untokenized(served, body, error)
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
            return self._untokenized(served, body, error)

    def _untokenized(self, served: Served, body: bytes, error: Exception) -> Asked:
        """A prompt whose tokens are not certain, or not there in time, is known by its text."""
        if isinstance(error, RequestError):
            text = _text_of(body, error.reason)
            return Asked(Query(served.model, reason=error.reason, text=text))
        if isinstance(error, TimeoutError):
            return Asked(Query(served.model, reason="deadline", text=body))
        return self.broken(error)

    def broken(self, error: Exception) -> Asked:
        """What is asked where something of ours failed."""
        tell_fault("decision failed with %s; the request is routed by load", error)
        return Asked(Query(self._models.default, reason="internal_error"))


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
    is_tokenized = {type(prompt) for prompt in request.prompts} != {array}
    demand = ANY if lora is None else Demand(lora)
    return Asked(Query(model, prompts, demand=demand, answers=request.answers), is_tokenized)
