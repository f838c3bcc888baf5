"""Reads recorded requests of any origin, and turns them into requests for simulated engines.

A line is one JSON object. It may have, in any order and beside other fields:

- when it arrived: `timestamp`, milliseconds since the beginning of the file, as in Mooncake's
  trace; or `time`, seconds since 1970 or a date as in RFC 3339;
- the lengths of prompt and answer, in tokens: `input_length`, `prompt_tokens` or `input_tokens`,
  and `output_length`, `completion_tokens` or `output_tokens`, or these inside `usage`;
- which part of its prompt others share: `hash_ids`, a number for each block of `block_size` tokens
  (512 by default), equal if the whole prompts up to the block's end are equal; or `session`,
  `session_id` or `conversation_id`: then a prompt begins with the previous one and its answer; or
  the request itself, `body`, with its `path` or `url`. A line that has `messages` or `prompt` is
  itself the body. A line with none of these shares nothing;
- whose it is: `tenant` or `user`, for plays in which only requests of one tenant share;
- the session that its client names, by which Envoy may keep it with a worker: `session_header`, or
  `session`, `session_id` or `conversation_id` in lines that are not KVSteer's own. If no line has
  one, sessions are derived from what requests share.

The other fields of KVSteer's own recordings are used as well: `began` (when the file began),
`model`, `cached_length`, `ttft_ms` and `placed_by`.

The input comes from outside: it is bounded and typed, and the first invalid line is an error that
names it.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

import msgspec

from extproc.base.errors import RequestError
from extproc.requests.prompt import NULL, is_given
from kvstate.overlap import Tokens
from kvtools.whatif.engines import Request

# The block size of Mooncake's own trace (arxiv 2407.00079, its trace release).
MOONCAKE_BLOCK_TOKENS = 512

# A body with pictures may be this long.
MAX_LINE_BYTES = 32 * 1024 * 1024

MAX_TOKENS = 16 * 1024 * 1024
MAX_BLOCK_TOKENS = 65_536

# Most blocks of all requests together, which take some gigabytes of memory.
MAX_BLOCKS = 40_000_000

_MAX_NUMBER = 1e13

# In `placed_by`: the proxy chose.
PROXY = "proxy"

_CHAT, _COMPLETION = "/v1/chat/completions", "/v1/completions"

# Turns a request's path and body into the tokens of its prompt.
Tokenize = Callable[[str, bytes], Tokens]


class RecordedRequest(NamedTuple):
    """One request as it was recorded."""

    # When it began, in seconds since some beginning.
    at: float
    # How many tokens its prompt has.
    tokens: int
    # How many tokens its answer has, 0 if that is not known.
    answer_tokens: int
    # The hashes of its blocks of block_tokens tokens each; None if they were not recorded.
    hashes: Sequence[int] | None = None
    # How many tokens a block of `hashes` has.
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    # The tokens of its prompt, if the body was recorded; else None.
    prompt: Tokens | None = None
    # Its session, "" without one.
    session: str = ""
    # How many prompt tokens were cached, as measured; None if that is not known.
    cached_tokens: int | None = None
    # The time until its first token, as measured; None if that is not known.
    first_token_seconds: float | None = None
    # Whose it is, "" if that is not known.
    tenant: str = ""
    # The session that its client names, "" if it names none.
    named_session: str = ""
    # The policy that placed it, or the proxy; "" if that is not known.
    placed_by: str = ""


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    input_tokens: int | None = None
    completion_tokens: int | None = None
    output_tokens: int | None = None


class _TraceLine(msgspec.Struct):
    timestamp: float | None = None
    time: float | str | None = None
    began: float | None = None
    input_length: int | None = None
    prompt_tokens: int | None = None
    input_tokens: int | None = None
    output_length: int | None = None
    completion_tokens: int | None = None
    output_tokens: int | None = None
    usage: _Usage | None = None
    hash_ids: list[int] | None = None
    block_size: int = MOONCAKE_BLOCK_TOKENS
    session: str | None = None
    session_id: str | None = None
    conversation_id: str | None = None
    session_header: str | None = None
    tenant: str | None = None
    user: str | None = None
    model: str | None = None
    body: msgspec.Raw = NULL
    messages: msgspec.Raw = NULL
    prompt: msgspec.Raw = NULL
    path: str | None = None
    url: str | None = None
    cached_length: int | None = None
    ttft_ms: float | None = None
    placed_by: str = ""


_line = msgspec.json.Decoder(_TraceLine)


class Trace:
    """The requests of some files.

    tokenize: for lines with the bodies of requests; None if there is no tokenizer. model: the one
    whose requests are used; None for all, which then must not name several models. gap_seconds:
    between two requests, if lines do not say when they arrived.
    requests: in order of time, the first one at 0. skipped: how many lines were not used.
    """

    def __init__(
        self,
        tokenize: Tokenize | None = None,
        model: str | None = None,
        gap_seconds: float | None = None,
        *,
        max_line_bytes: int = MAX_LINE_BYTES,
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        self._tokenize = tokenize
        self._model = model
        self._gap_seconds = gap_seconds
        self._max_line_bytes = max_line_bytes
        self._max_blocks = max_blocks
        self._blocks = 0
        self._models: set[str] = set()
        self._requests: list[RecordedRequest] = []
        self.skipped = 0

    @property
    def requests(self) -> list[RecordedRequest]:
        """The requests read so far, in order of time, the first one at 0."""
        found = sorted(self._requests, key=lambda one: one.at)
        return [one._replace(at=one.at - found[0].at) for one in found]

    def read(self, name: str, lines: Iterable[bytes]) -> None:
        """Reads a file; empty lines are skipped.

        name: the file's name, for messages.

        Raises:
            ValueError: a line is invalid.
        """
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                self._take(line)
            except (ValueError, OverflowError) as error:
                raise ValueError(f"{name}, line {number}: {error}") from None

    def _take(self, line: bytes) -> None:
        if len(line) > self._max_line_bytes:
            raise ValueError(f"is longer than {self._max_line_bytes} bytes")
        found = _line.decode(line)
        if self._model is not None and found.model not in (None, self._model):
            self.skipped += 1
            return
        if self._model is None and found.model is not None:
            self._models.add(found.model)
            if len(self._models) > 1:
                both = ", ".join(sorted(self._models))
                raise ValueError(f"another model ({both}): name the one to play with --model")
        try:
            recorded = self._recorded(found, line)
        except RequestError:  # a prompt whose tokens are not certain
            self.skipped += 1
            return
        if not recorded.tokens:
            self.skipped += 1
            return
        self._blocks += len(recorded.hashes or ())
        _limit(self._blocks, self._max_blocks)
        self._requests.append(recorded)

    def _recorded(self, line: _TraceLine, text: bytes) -> RecordedRequest:
        usage = line.usage or _Usage()
        answer = _count("the answer's length", line.output_length, line.completion_tokens,
            line.output_tokens, usage.completion_tokens, usage.output_tokens)  # fmt: skip
        made = RecordedRequest(
            self._time(line), 0, answer or 0, session=_session(line),
            tenant=line.tenant or line.user or "", named_session=_named_session(line),
            placed_by=line.placed_by,
            cached_tokens=_count("cached_length", line.cached_length),
            first_token_seconds=None if line.ttft_ms is None
            else _number("ttft_ms", line.ttft_ms) / 1000,
        )  # fmt: skip
        is_body = is_given(line.messages) or is_given(line.prompt)
        if is_body or is_given(line.body):
            prompt = self._tokens(line, text if is_body else bytes(line.body))
            return made._replace(tokens=len(prompt), prompt=prompt)
        tokens = _count("the prompt's length", line.input_length, line.prompt_tokens,
            line.input_tokens, usage.prompt_tokens, usage.input_tokens)  # fmt: skip
        if tokens is None:
            raise ValueError("has neither `input_length` nor `prompt_tokens` nor a body")
        if not 1 <= line.block_size <= MAX_BLOCK_TOKENS:
            raise ValueError(f"`block_size` must be from 1 to {MAX_BLOCK_TOKENS}")
        return made._replace(tokens=tokens, hashes=line.hash_ids, block_tokens=line.block_size)

    def _time(self, line: _TraceLine) -> float:
        if line.timestamp is not None:
            return _number("began", line.began or 0.0) + _number("timestamp", line.timestamp) / 1000
        if isinstance(line.time, str):
            return datetime.fromisoformat(line.time).timestamp()
        if line.time is not None:
            return _number("time", line.time)
        if self._gap_seconds is None:
            raise ValueError("has neither `timestamp` nor `time`: give --arrivals")
        return self._gap_seconds * len(self._requests)

    def _tokens(self, line: _TraceLine, body: bytes) -> Tokens:
        if self._tokenize is None:
            raise ValueError("is a request with its body: give --tokenizer or --config")
        path = line.path or line.url or (_CHAT if b'"messages"' in body else _COMPLETION)
        return self._tokenize(path, body)


def _count(what: str, *given: int | None) -> int | None:
    found = next((one for one in given if one is not None), None)
    if found is not None and not 0 <= found <= MAX_TOKENS:
        raise ValueError(f"{what} must be from 0 to {MAX_TOKENS}")
    return found


def _limit(blocks: int, most: int) -> None:
    if blocks > most:
        raise ValueError(f"more than {most} blocks: play a part of it, as with --first")


def _number(what: str, given: float) -> float:
    if not abs(given) <= _MAX_NUMBER:
        raise ValueError(f"`{what}` is no such number")
    return given


def _session(line: _TraceLine) -> str:
    return line.session or line.session_id or line.conversation_id or ""


def _named_session(line: _TraceLine) -> str:
    """Returns the session that a client names; `session` of our own lines is the router's guess."""
    is_own = line.began is not None
    return line.session_header or ("" if is_own else _session(line))


def block_tokens_of(requests: Iterable[RecordedRequest], usual: int, most: int) -> int:
    """Returns the block size, in tokens, with which requests are played by default.

    usual: the size if no request has hashes. most: the largest size if requests have hashes.
    """
    sizes = {one.block_tokens for one in requests if one.hashes is not None}
    return min(most, math.gcd(*sizes)) if sizes else usual


class Replay(NamedTuple):
    """How requests are played.

    speedup: they arrive so many times as fast as recorded. answer_tokens: the length of an answer
    if it is unknown. continues: whether the next prompt that begins with all of a request's prompt
    is assumed to contain that request's answer. isolates: whether only requests of one tenant share
    blocks.
    """

    block_tokens: int
    speedup: float = 1.0
    answer_tokens: int = 128
    continues: bool = True
    isolates: bool = False


def requests_of(
    recorded: Sequence[RecordedRequest], replay: Replay, max_blocks: int = MAX_BLOCKS
) -> list[Request]:
    """Returns the requests for simulated engines; recorded: in order of time.

    Raises:
        ValueError: blocks of the recorded size cannot be played in blocks of the replay's size, or
            there are too many.
    """
    size = replay.block_tokens
    tokens = sum(one.tokens + (one.answer_tokens or replay.answer_tokens) for one in recorded)
    _limit(tokens // size, max_blocks)
    prompts = _Prompts(size)
    made = []
    for one in recorded:
        answer = one.answer_tokens or replay.answer_tokens
        blocks = prompts.blocks_of(one, answer, one.tenant if replay.isolates else "")
        made.append(Request(one.at / replay.speedup, blocks, one.tokens, answer))
    following = _following(made, [one.tokens // size for one in made])
    _name_sessions(made, recorded, size)
    for number, request in enumerate(made):
        whole = request.tokens // size
        count = max(1, math.ceil(request.answer_tokens / size))
        answer_blocks: Sequence[int] = ()
        if replay.continues and number in following:
            length = (request.tokens + request.answer_tokens) // size
            answer_blocks = made[following[number]].blocks[whole : min(whole + count, length)]
        fresh = prompts.fresh(count - len(answer_blocks))
        request.answer_blocks = [*answer_blocks, *fresh]
    return made


def _following(requests: Sequence[Request], wholes: Sequence[int]) -> dict[int, int]:
    """Returns the number of the request that continues another one, by the latter's number.

    It begins with all whole blocks of that one's prompt, has room for its answer, and is the first
    that does. wholes: how many whole blocks each prompt has.
    """
    waiting: dict[int, int] = {}
    found: dict[int, int] = {}
    for number, (request, whole) in enumerate(zip(requests, wholes, strict=True)):
        for block in request.blocks[:whole]:
            before = waiting.get(block)
            if before is None:
                continue
            earlier = requests[before]
            if request.tokens >= earlier.tokens + earlier.answer_tokens:
                del waiting[block]
                found[before] = number
        if whole:
            waiting[request.blocks[whole - 1]] = number
    return found


def names_sessions(recorded: Iterable[RecordedRequest]) -> bool:
    """Returns whether clients name their sessions; otherwise sessions are derived."""
    return any(one.named_session for one in recorded)


def _name_sessions(
    requests: Sequence[Request], recorded: Sequence[RecordedRequest], size: int
) -> None:
    """Sets the session of each request: as recorded; if none is, that of the one it continues."""
    if names_sessions(recorded):
        for request, one in zip(requests, recorded, strict=True):
            request.session = one.named_session
        return
    # a hash of a block that is not full is another one as soon as it is
    following = _following(requests, [_whole_as_recorded(one, size) for one in recorded])
    # of several that a request continues, the one counts that has most of its prompt
    by_length = sorted(following, key=lambda earlier: requests[earlier].tokens)
    before = {following[earlier]: earlier for earlier in by_length}
    for number, request in enumerate(requests):
        earlier = before.get(number, -1)
        request.session = requests[earlier].session if earlier >= 0 else f"derived-{number}"


def _whole_as_recorded(one: RecordedRequest, size: int) -> int:
    """Returns how many blocks of a size are in blocks that were whole when they were recorded."""
    step = size if one.hashes is None else max(size, one.block_tokens)
    return one.tokens // step * (step // size)


class _Prompts:
    """The numbers of prompts' blocks: equal if the whole prompts up to a block's end are equal."""

    def __init__(self, block_tokens: int) -> None:
        self._size = block_tokens
        self._numbers = itertools.count()
        self._of_hash: dict[tuple[str, int, int, int, int], int] = {}
        self._of_tokens: dict[tuple[str, int, bytes], int] = {}
        self._of_session: dict[tuple[str, str], list[int]] = {}

    def fresh(self, count: int) -> Iterator[int]:
        """Returns numbers that no other block has; none if the count is negative."""
        return itertools.islice(self._numbers, max(0, count))

    def blocks_of(
        self, recorded: RecordedRequest, answer_tokens: int, tenant: str
    ) -> Sequence[int]:
        """Returns the blocks of a prompt; the last one may not be full.

        tenant: whose blocks these are; "" if all share theirs.
        """
        count = math.ceil(recorded.tokens / self._size)
        if recorded.prompt is not None:
            found = list(self._by_tokens(tenant, recorded.prompt))
        elif recorded.hashes is not None:
            found = self._by_hashes(tenant, recorded.hashes, recorded.block_tokens)
        else:
            found = self._by_session(tenant, recorded, answer_tokens)
        found = found[:count]
        return [*found, *self.fresh(count - len(found))]

    def _by_tokens(self, tenant: str, prompt: Tokens) -> Iterator[int]:
        before = -1
        for start in range(0, len(prompt), self._size):
            key = (tenant, before, prompt[start : start + self._size].tobytes())
            before = self._of_tokens.get(key, -1)
            if before < 0:
                before = self._of_tokens[key] = next(self._numbers)
            yield before

    def _by_hashes(self, tenant: str, hashes: Sequence[int], size: int) -> list[int]:
        if size % self._size and self._size % size:
            raise ValueError(
                f"blocks of {size} tokens cannot be played in blocks of {self._size}: --block-size"
                " must be a part or a multiple of it"
            )
        split, joined = max(1, size // self._size), max(1, self._size // size)
        ends = [
            *hashes[joined - 1 :: joined],
            *(hashes[-1:] if len(hashes) % joined else ()),
        ]
        found, before = [], -1
        for one in ends:
            for part in range(split):
                # with the block before, so that equal blocks always have equal prefixes
                before = self._number((tenant, before, one, size, part))
                found.append(before)
        return found

    def _number(self, block: tuple[str, int, int, int, int]) -> int:
        found = self._of_hash.get(block, -1)
        if found < 0:
            found = self._of_hash[block] = next(self._numbers)
        return found

    def _by_session(self, tenant: str, recorded: RecordedRequest, answer_tokens: int) -> list[int]:
        if not recorded.session:
            return []
        session = tenant, recorded.session
        known = self._of_session.get(session, [])
        wanted = recorded.tokens // self._size
        prompt = [*known[:wanted], *self.fresh(wanted - len(known))]
        after = (recorded.tokens + answer_tokens) // self._size
        self._of_session[session] = [*prompt, *self.fresh(after - wanted)]
        return prompt
