"""What a request asks: parses its body, and tokenizes its prompt."""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from extproc.base.errors import RequestError
from extproc.base.logs import log_fault
from extproc.media.knowledge import MediaKnowledge
from extproc.media.prompts import FilledPrompt, MediaPrompt
from extproc.observing.decisions import Timeline
from extproc.requests.compression import COMPRESSED, is_compressed
from extproc.requests.costly_json import is_light
from extproc.requests.dialect import NEWEST, Dialect, DialectFor, ModelDialects
from extproc.requests.media import stand_ins_of
from extproc.requests.odd_json import OddBody, rewritten
from extproc.requests.outline import Outline, beginning_of, outline_of
from extproc.requests.plain_chat import read_plain
from extproc.requests.prompt import BY_RELEASE, TEXT, Chat
from extproc.requests.request import (
    CHAT_PATH,
    ENGINES_REFUSE,
    MAX_BYTES,
    MAY_BE_ODD,
    NOT_INFERENCE,
    UNREAD,
    Head,
    InferenceRequest,
    Models,
    RoutingRequest,
    ServedModel,
    model_of,
    parse,
)
from extproc.requests.tenant_salt import written_salt
from extproc.routing.decision import CALLS_NO_MODEL, FINDS_MODEL
from extproc.routing.inputs.query import Media, MediaItem, Query, Variant
from extproc.routing.savings.savings import MAX_UNREAD_BYTES
from extproc.tokenizing.prompt_tokens import KeyedPrompts, PromptTokens, ThreadUse
from kvstate.overlap import Prompt, Tokens

if TYPE_CHECKING:
    from extproc.tokenizing.plain_turns import PlainTurns, TurnParts

log = logging.getLogger("kvsteer.decision")

# The key of a cache salt in a body: only prompts with the same salt share blocks.
_SALT = b'"cache_salt"'
_PIECE_BYTES = 1024 * 1024  # searched within two milliseconds


class PlainChat(msgspec.Struct, frozen=True, gc=False):
    """A conversation that all engines pass on as it is.

    served: the model it is for. salt: of its cache. turns: of the model's conversations. parts: its
    own turns.
    """

    served: ServedModel
    salt: str | None
    turns: "PlainTurns"
    parts: "TurnParts"


# A request, and the model it is for.
ServedRequest = tuple[InferenceRequest, ServedModel]


def _newest(_: str) -> ModelDialects:
    return ModelDialects(NEWEST)


class Queries:
    """Turns any request into a query: parses its body and tokenizes its prompt.

    dialects_of: returns the dialects that the workers of a model speak. media: what is known of
    media items. names_sessions: whether a field of a body may name the client's session.
    """

    def __init__(
        self,
        models: Models,
        tokens: PromptTokens,
        dialects_of: Callable[[str], ModelDialects] = _newest,
        media: MediaKnowledge | None = None,
        *,
        names_sessions: bool = True,
    ) -> None:
        self._models = models
        self._tokens = tokens
        self._dialects_of = dialects_of
        self._names_sessions = names_sessions
        self._media = media or MediaKnowledge(b"")

    async def make_query(self, request: RoutingRequest, timeline: Timeline) -> Query:
        """Returns the query for a request; waits only for work that takes a millisecond or more.

        An error in KVSteer itself is caught here alone: it is logged, and the request is routed by
        load. No faster way hides its errors behind a slower one that works.

        timeline: notes the ends of the request's phases.
        """
        if request.body is None or request.reason:
            return _unread(request)
        path, body = request.head.path, request.body
        try:
            if path == CHAT_PATH and len(body) <= MAX_BYTES:
                plain = self._find_plain(body)
                if plain is not None:  # most requests end here
                    query = self._of_plain(plain, timeline)
                    return query or await self._of_new_turns(plain, path, body, timeline)
            return await self._in_all_dialects(request.head, body, timeline)
        except Exception as error:  # noqa: BLE001 - whatever it is, the request must go on
            return broken(self._unread_of(body), error)

    async def _in_all_dialects(self, head: Head, body: bytes, timeline: Timeline) -> Query:
        """Returns the query for a request that is decoded, as each worker of its model reads it."""
        query = await self._first(head.path, body, timeline)
        if query.reason in MAY_BE_ODD:
            query, body = await self._read_again(query, head, body, timeline)
        if query.model is None or not query.forms & ~TEXT:
            return query
        dialects = self._dialects_of(query.model)
        if not query.forms & BY_RELEASE and not dialects.differs_by_engine:
            return query
        if not dialects.rest:
            return query
        return await self._with_variants(query, dialects.rest, head.path, body, timeline)

    async def _read_again(
        self, query: Query, head: Head, body: bytes, timeline: Timeline
    ) -> tuple[Query, bytes]:
        """Returns the query for a body that a strict decoder refused, and what was read.

        query: so far.
        """
        if query.reason == "bad_json" and is_compressed(body, head.encoding):
            return msgspec.structs.replace(query, reason=COMPRESSED), body
        if query.reason == "bad_json" and not self._reads_odd_json(query.model):
            return query, body
        try:
            if is_light(body):
                odd = rewritten(body)
            else:
                odd = await self._tokens.run_in_thread(
                    partial(rewritten, body), len(body), None, timeline.whose
                )
        except TimeoutError:
            return self._of_unparsed(body, "deadline", beginning_of(body)), body
        except RequestError as error:
            if error.reason in ENGINES_REFUSE:
                return query, body
            return self._of_unparsed(body, error.reason, beginning_of(body)), body
        return await self._first(head.path, odd, timeline), odd

    def _reads_odd_json(self, model: str | None) -> bool:
        """Returns whether a worker of a model may read a body that a strict decoder refuses."""
        if model is None:
            return True
        dialects = self._dialects_of(model)
        return any(one.reads_odd_json for one in (dialects.first, *[it for it, _ in dialects.rest]))

    def _find_plain(self, body: bytes) -> PlainChat | None:
        """Returns what is known of a plain conversation, if all engines pass it on as it is."""
        chat = read_plain(body)
        served = None if chat is None else self._models.find(chat[0])
        if chat is None or served is None:
            return None
        turns = self._plain_turns(served.model)
        if turns is None:
            return None
        parts = turns.find(body, chat)
        return None if parts is None else PlainChat(served, chat[1], turns, parts)

    def _plain_turns(self, model: str) -> "PlainTurns | None":
        """Returns the turns of plain conversations, None if engines may read these differently."""
        turns = self._tokens.plain_turns(model)
        if turns is None:
            return None
        dialects = self._dialects_of(model)
        if dialects.differs_by_engine or not dialects.first.is_vllms:
            return None
        return None if dialects.rest and turns.forms & BY_RELEASE else turns

    def _of_plain(self, plain: PlainChat, timeline: Timeline) -> Query | None:
        """Returns the query for a plain conversation of which most is known; None for any other."""
        turns, parts = plain.turns, plain.parts
        timeline.parsed_at = timeline.clock()
        if not turns.is_cheap(parts):
            return None
        try:
            tokens = turns.finish(parts)
        except RequestError:  # `_first` meets it again, and says why
            return None
        timeline.tokenized_at = timeline.clock()
        return _of_turns(plain, tokens)

    async def _of_new_turns(
        self, plain: PlainChat, path: str, body: bytes, timeline: Timeline
    ) -> Query:
        """Returns the query for a plain conversation with long new turns."""
        finish, held = partial(plain.turns.finish, plain.parts), ThreadUse(plain.served.model)
        try:
            tokens = await self._tokens.run_in_thread(finish, len(body), held, timeline.whose)
        except TimeoutError:
            outline = self._outline_of(body) if is_light(body) else beginning_of(body)
            return self._by_text(plain.served, "deadline", outline, plain.salt)
        except RequestError:  # `_first` meets it again, and says why
            return await self._first(path, body, timeline)
        timeline.tokenized_at = timeline.clock()
        return _of_turns(plain, tokens)

    async def _first(self, path: str, body: bytes, timeline: Timeline) -> Query:
        """Returns the query in the first dialect of the model's workers."""
        if not is_light(body):
            return await self._large(path, body, timeline)
        read = self._read(path, body, self._speaks)
        timeline.parsed_at = timeline.clock()
        if isinstance(read, Query):
            return read
        query = await self._tokenized(*read, body, timeline)
        timeline.tokenized_at = timeline.clock()
        return query

    def _speaks(self, name: str | None) -> Dialect:
        """Returns the dialect in which a request is read first, by the name of its model."""
        served = self._models.find(name)
        return NEWEST if served is None else self._dialects_of(served.model).first

    async def _with_variants(
        self,
        query: Query,
        others: Sequence[tuple[Dialect, frozenset[str]]],
        path: str,
        body: bytes,
        timeline: Timeline,
    ) -> Query:
        """Returns a query with the prompts of workers that speak other dialects.

        A worker whose dialect does not key the request holds nothing of it.
        """
        variants = []
        for dialect, workers in others:
            prompts, forms = await self._prompts_in(dialect, path, body, timeline)
            if prompts != query.prompts or forms != query.forms:
                variants.append(Variant(workers, prompts, forms))
        return msgspec.structs.replace(query, variants=variants)

    async def _prompts_in(
        self, dialect: Dialect, path: str, body: bytes, timeline: Timeline
    ) -> tuple[Sequence[Prompt], int]:
        """Returns a request's prompts in a dialect, and their forms; none if it is not keyed."""
        held = ThreadUse()

        def read_and_tokenized() -> Query | None:
            read = self._read(path, body, lambda _: dialect)
            if isinstance(read, Query):
                return read
            tokens = self._tokens.tokenize_inline(read[0], read[1].model, held)
            return None if tokens is None else _keyed(*read, tokens)

        try:
            query = await self._tokens.run_in_thread(
                read_and_tokenized, len(body), held, timeline.whose
            )
        except (RequestError, TimeoutError):
            query = None
        return (query.prompts, query.forms) if query is not None else ((), 0)

    def _read(self, path: str, body: bytes, speaks: DialectFor) -> ServedRequest | Query:
        """Returns a request and its model, or the query if the request cannot be keyed."""
        try:
            request = parse(path, body, speaks)
        except RequestError as error:
            return self._unparsed(body, error.reason)
        served = self._models.find(request.model)
        if served is None:
            return Query(None, reason="unknown_model")
        return request, served

    def _unparsed(self, body: bytes, reason: str) -> Query:
        """Returns the query for a request that could not be read."""
        outline = None if reason in ENGINES_REFUSE else self._outline_of(body)
        return self._of_unparsed(body, reason, outline)

    def _outline_of(self, body: bytes) -> Outline:
        """Returns the outline by which a prompt is compared and weighed."""
        return outline_of(body, self._media.digests)

    def _of_unparsed(self, body: bytes, reason: str, outline: Outline | None) -> Query:
        served = self._models.find(model_of(body))
        salt = written_salt(body)
        if salt is None and _may_have_salt(body):
            salt = ""  # its value is not known
        return self._by_text(served, reason, outline, salt)

    def _by_text(
        self,
        served: ServedModel | None,
        reason: str,
        outline: Outline | None,
        salt: str | None,
        *,
        reads_cache: bool = True,
    ) -> Query:
        """Returns the query for a prompt that is compared by its text. salt: "" if unknown."""
        model, lora = served or (None, None)
        salt = None if served is None else salt
        if outline is None:
            return Query(model, (), reason, lora=lora, salt=salt, reads_cache=reads_cache)
        return Query(
            model,
            (),
            reason,
            outline.measured(partial(self._media.averages.tokens_of, model)),
            lora=lora,
            salt=salt,
            reads_cache=reads_cache,
            session=self._session_of(outline),
            previous=outline.previous,
        )

    def _session_of(self, outline: Outline) -> str:
        """Returns the session that a body names, "" if it names none or that is not looked at."""
        return outline.session if self._names_sessions else ""

    async def _large(self, path: str, body: bytes, timeline: Timeline) -> Query:
        """Parses and tokenizes a large body in a thread, so that no other request waits for it."""
        held = ThreadUse()
        try:
            read, body, timeline.parsed_at = await self._tokens.run_in_thread(
                partial(self._read_and_tokenized, path, body, timeline, held),
                len(body),
                held,
                timeline.whose,
            )
        except TimeoutError:
            return self._of_unparsed(body, "deadline", beginning_of(body))
        except RequestError as error:
            return self._of_unparsed(body, error.reason, beginning_of(body))
        query = read if isinstance(read, Query) else await self._tokenized(*read, body, timeline)
        timeline.tokenized_at = timeline.clock()
        return query

    def _read_and_tokenized(
        self, path: str, body: bytes, timeline: Timeline, held: ThreadUse
    ) -> tuple[ServedRequest | Query, bytes, float]:
        """Returns the query, or the request if workers tokenize it; its body, which has digests for
        the data of media; and when it was parsed.
        """
        read, body = self._read_elided(path, body)
        parsed_at = timeline.clock()
        if isinstance(read, Query):
            return read, body, parsed_at
        request, served = read
        try:
            tokens = self._tokens.tokenize_inline(request, served.model, held)
            if tokens is not None:
                return self._keyed(request, served, tokens, body), body, parsed_at
        except RequestError as error:
            outlined = partial(self._outline_of, body)
            return self._untokenized(request, served, error, outlined), body, parsed_at
        return read, body, parsed_at

    def _read_elided(self, path: str, body: bytes) -> tuple[ServedRequest | Query, bytes]:
        """Returns what `_read` does of a body, and the body, both with digests for media's data."""
        short, digests = self._media.digests.elided(body)
        if isinstance(body, OddBody):
            short = OddBody(short)
        read = self._read(path, short, self._speaks)
        if not digests or isinstance(read, Query) or stand_ins_in(read[0]) == digests:
            return read, short
        # some were not of media parts
        return self._read(path, body, self._speaks), body

    async def _tokenized(
        self, request: InferenceRequest, served: ServedModel, body: bytes, timeline: Timeline
    ) -> Query:
        try:
            tokens = await self._tokens.tokenize(request, served.model, len(body), timeline.whose)
            return self._keyed(request, served, tokens, body)
        except (RequestError, TimeoutError) as error:
            outline = await self._outlined(body, error, timeline)
            return self._untokenized(request, served, error, lambda: outline)

    async def _outlined(
        self, body: bytes, error: RequestError | TimeoutError, timeline: Timeline
    ) -> Outline:
        """Returns a body's outline; of its beginning alone if the request is late already."""
        if is_light(body):
            return self._outline_of(body)
        if isinstance(error, RequestError) and error.reason != "too_many_waiting":
            with suppress(TimeoutError, RequestError):
                return await self._tokens.run_in_thread(
                    partial(self._outline_of, body), len(body), None, timeline.whose
                )
        return beginning_of(body)

    def _keyed(
        self, request: InferenceRequest, served: ServedModel, keyed: KeyedPrompts, body: bytes
    ) -> Query:
        """Returns the query for a request whose tokens are known, as far as its media are.

        body: as it was read, maybe elided.
        """
        chat = request.prompts[0]
        if not isinstance(chat, Chat) or not chat.has_media or keyed.drops_media:
            return _keyed(request, served, keyed)
        return self._with_media(request, served, chat, keyed, body)

    def _with_media(
        self,
        request: InferenceRequest,
        served: ServedModel,
        chat: Chat,
        keyed: KeyedPrompts,
        body: bytes,
    ) -> Query:
        """Returns the query for a prompt with media, as far as they are known."""
        (tokens,), salt = keyed.tokens, request.cache_salt
        model, lora = served
        prompt, namespace = Prompt(model, tokens, lora, salt), (model, lora, salt)
        tokens_of = partial(self._media.averages.tokens_of, model)
        outline = self._outline_of(body)
        text_tokens = len(prompt.tokens)
        media = Media(
            [MediaItem(kind, False, True, tokens_of(kind)) for kind, _ in chat.media],
            text_tokens + outline.tokens_from(0, tokens_of),
            is_whole=False,
            text_tokens=text_tokens,
        )
        if keyed.parts is not None:
            whole = self._media.prompt(
                keyed.parts,
                chat.media,
                namespace,
                chat.processor_arguments,
                has_own_ids=chat.conversion is not None,
            )
            full = self._media.filled(whole)
            prompt = Prompt(model, full.tokens, lora, salt, full.sure_tokens)
            media = _media_of(whole, full, outline, tokens_of)
        return _of_prompts(
            request,
            served,
            [prompt],
            keyed.forms,
            media=media,
            salt=salt,
            outline=outline.measured(tokens_of),
            session=self._session_of(outline),
        )

    def _untokenized(
        self,
        request: InferenceRequest,
        served: ServedModel,
        error: RequestError | TimeoutError,
        outlined: Callable[[], Outline],
    ) -> Query:
        """Returns the query by text for a prompt whose tokens are uncertain or late."""
        reason = error.reason if isinstance(error, RequestError) else "deadline"
        outline = None if reason in ENGINES_REFUSE else outlined()
        return self._by_text(
            served, reason, outline, request.cache_salt, reads_cache=request.reads_cache
        )

    def _unread_of(self, body: bytes) -> Query:
        """Returns the query for a body of which only the model is read, if that can be."""
        with suppress(Exception):  # it may be what failed before
            served = self._models.find(model_of(body))
            return Query(None) if served is None else Query(served.model, lora=served.lora)
        return Query(None)


def broken(query: Query, error: Exception) -> Query:
    """Logs an error in KVSteer itself, and returns what is left of the query of its request."""
    log_fault(log, "decision failed with %s; the request is routed by load", error)
    reason = query.reason if query.proxy_reason else "internal_error"
    return msgspec.structs.replace(
        query, prompts=(), variants=(), forms=0, media=None, reason=reason
    )


def _may_have_salt(body: bytes) -> bool:
    """Returns whether a body names a salt; other threads have a turn after each piece."""
    pieces = range(0, len(body), _PIECE_BYTES)
    return any(body.find(_SALT, at, at + _PIECE_BYTES + len(_SALT)) >= 0 for at in pieces)


def _media_of(
    prompt: MediaPrompt, full: FilledPrompt, outline: Outline, tokens_of: Callable[[str], float]
) -> Media:
    """Returns what is known of the media of a prompt."""
    items, unknown = [], 0
    for number, (item, identity) in enumerate(zip(prompt.items, full.identities, strict=False)):
        is_known = identity is not None and identity.is_whole
        tokens = float(identity.count) if identity and is_known else tokens_of(item.kind)
        items.append(MediaItem(item.kind, is_known, item.is_exact, tokens))
        unknown += is_known and unknown == number
    weighed = float(full.known_tokens)
    if not full.is_whole:
        weighed += outline.tokens_from(unknown, tokens_of)
    return Media(items, weighed, full.is_whole, full.text_tokens, prompt)


def stand_ins_in(request: InferenceRequest) -> int:
    """Returns how many texts of a request's media parts stand for their data."""
    chats = [one for one in request.prompts if isinstance(one, Chat)]
    return sum([stand_ins_of([part for _, part in chat.media]) for chat in chats])


def _unread(request: RoutingRequest) -> Query:
    """Returns the query for a request whose body is not read, weighed by its length if known."""
    if request.reason == NOT_INFERENCE and not request.wants_endpoint:
        return Query(None, reason=request.reason, proxy_reason=CALLS_NO_MODEL)
    if request.reason in ("no_body", NOT_INFERENCE):
        return Query(None, reason=request.reason)
    finds_model = FINDS_MODEL if request.proxy_finds_model else ""
    if request.reason not in UNREAD:
        return Query(None, reason=request.reason, proxy_reason=finds_model)
    length = request.head.content_length
    return Query(
        None,
        reason=request.reason,
        unread_bytes=MAX_UNREAD_BYTES if length is None else length,
        proxy_reason=finds_model,
    )


def _of_turns(plain: PlainChat, tokens: Tokens) -> Query:
    model, lora = plain.served
    prompt = Prompt(model, tokens, lora, plain.salt)
    return Query(model, [prompt], lora=lora, forms=plain.turns.forms)


def _keyed(request: InferenceRequest, served: ServedModel, keyed: KeyedPrompts) -> Query:
    model, lora = served
    prompts = [Prompt(model, one, lora, request.cache_salt) for one in keyed.tokens]
    return _of_prompts(request, served, prompts, keyed.forms)


def _of_prompts(
    request: InferenceRequest,
    served: ServedModel,
    prompts: Sequence[Prompt],
    forms: int,
    *,
    media: Media | None = None,
    salt: str | None = None,
    outline: Outline | None = None,
    session: str = "",
) -> Query:
    """Returns the query for keyed prompts. salt, outline, session: of one with media."""
    is_read = request.reads_cache
    return Query(
        served.model,
        prompts,
        # the prompt is known and weighed, but the worker will not use its cache for it
        "" if is_read else "reads_no_cache",
        outline,
        media,
        served.lora,
        salt,
        reads_cache=is_read,
        answers=request.answers if is_read else 1,
        forms=forms if is_read else 0,
        session=session,
        previous="" if outline is None else outline.previous,
        needs_text=request.needs_text,
    )
