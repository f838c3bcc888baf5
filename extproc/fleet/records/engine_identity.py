"""What a worker's answers say about its engine: its name, its release, and SGLang's arguments.

Sources: `GET /v1/models` of vLLM, SGLang and TensorRT-LLM, whose cards name the engine as
`owned_by`; the names in `GET /metrics` of vLLM and SGLang; `GET /version` of vLLM and TensorRT-LLM,
an object with `version`; `GET /server_info` of SGLang, formerly `/get_server_info`, an object with
its arguments and `version`.
"""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec

from extproc.base.engine import (
    LEARNED,
    SGLANG,
    TRTLLM,
    VLLM,
    Engine,
    PromptArguments,
    Release,
    release_of,
)
from extproc.config.schema import MAX_RANKS, WorkerEngine
from kvstate.errors import printable
from kvstate.undecodable import UNDECODABLE

# As an engine names itself as the owner of its models.
_OWNERS = {"vllm": VLLM, "sglang": SGLANG, "tensorrt_llm": TRTLLM}

# How the names of metrics begin, by engine.
_FAMILIES = {VLLM: b"vllm:", SGLANG: b"sglang:"}

# Characters of a worker's word that are shown, and of an argument that are kept.
MAX_SHOWN = 60

# No cache holds more tokens on one rank.
MOST_CACHE_TOKENS = 2**40
MAX_ARGUMENT = 4_096

UNASKED = "it was not asked yet"


class _CacheArguments(msgspec.Struct):
    disable_radix_cache: bool | None = None


class _CacheSize(msgspec.Struct):
    max_total_num_tokens: Annotated[int, msgspec.Meta(ge=1, le=MOST_CACHE_TOKENS)] | None = None
    dp_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)] = 1


class _Card(msgspec.Struct):
    owned_by: str = ""


class _Cards(msgspec.Struct):
    data: list[_Card]


class _VersionAnswer(msgspec.Struct):
    version: str


class _Arguments(msgspec.Struct):
    chat_template: str | None = None
    hf_chat_template_name: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    default_chat_template_kwargs: dict[str, Any] | None = None
    enable_multimodal: bool | None = None


def owner_in(models: bytes) -> str | None:
    """Returns the engine that owns the models of an answer to GET /v1/models.

    None if they have no owner, several, or one that is no known engine.
    """
    try:
        cards = msgspec.json.decode(models, type=_Cards).data
    except UNDECODABLE:
        return None
    owners = {card.owned_by for card in cards}
    return _OWNERS.get(owners.pop()) if len(owners) == 1 else None


def engine_of_metrics(text: bytes) -> str | None:
    """Returns the engine that a text of metrics is of; None if that is none or several."""
    found = [
        name
        for name, prefix in _FAMILIES.items()
        if text.startswith(prefix) or b"\n" + prefix in text
    ]
    return found[0] if len(found) == 1 else None


def drafts_in_metrics(text: bytes) -> bool:
    """Returns whether a vLLM may run a draft model.

    It counts drafts only if it makes any (0.32, v1/spec_decode/metrics.py), but also those of
    methods that need no model.
    """
    return b"\nvllm:spec_decode_num_draft" in text


def caches_in_info(answer: bytes) -> bool | None:
    """Returns whether an SGLang caches prefixes, by its answer to GET /server_info.

    None if that is not known.
    """
    try:
        is_off = msgspec.json.decode(answer, type=_CacheArguments).disable_radix_cache
    except UNDECODABLE:
        return None
    return None if is_off is None else not is_off


def cache_tokens_in_info(answer: bytes) -> int | None:
    """Returns how many tokens an SGLang can cache, on all ranks, by its answer to GET /server_info.

    It says so of one rank (0.5.23, get_init_info in srt/managers/scheduler.py). None if that is not
    known.
    """
    try:
        size = msgspec.json.decode(answer, type=_CacheSize)
    except UNDECODABLE:
        return None
    tokens = size.max_total_num_tokens
    return None if tokens is None else tokens * size.dp_size


def release_in(answer: bytes) -> Release | str:
    """Returns the release in an answer to GET /version or /server_info, or why there is none."""
    try:
        version = msgspec.json.decode(answer, type=_VersionAnswer).version
    except UNDECODABLE:
        return "its answer names no version"
    release = release_of(version)
    return f"{printable(version, MAX_SHOWN)!r} is no release" if release is None else release


def arguments_in(answer: bytes) -> PromptArguments | None:
    """Returns SGLang's arguments in its answer to GET /server_info.

    None if one of them is of a wrong type, or longer than `MAX_ARGUMENT`.
    """
    try:
        given = msgspec.json.decode(answer, type=_Arguments)
    except UNDECODABLE:
        return None
    keywords = given.default_chat_template_kwargs
    read = PromptArguments(
        given.chat_template,
        given.hf_chat_template_name,
        given.tool_call_parser,
        given.reasoning_parser,
        None if keywords is None else msgspec.json.encode(keywords).decode(),
        given.enable_multimodal,
    )
    return read if are_short(read) else None


def are_short(arguments: PromptArguments) -> bool:
    """Returns whether no argument is longer than `MAX_ARGUMENT`."""
    return all(len(one) <= MAX_ARGUMENT for one in arguments if isinstance(one, str))


class EngineAnswer(NamedTuple):
    """What a worker said about its engine the last time that it answered; None: it did not say."""

    # Its name and release.
    engine: Engine | None = None
    # Why the engine is unknown.
    reason: str = UNASKED
    # SGLang's arguments that change prompts.
    arguments: PromptArguments | None = None
    # Whether it may run a draft model.
    drafts: bool | None = None
    # Whether it caches prefixes.
    caches: bool | None = None
    # Tokens in a block.
    block_size: int | None = None
    # How many tokens it can cache.
    cache_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """What is known of a worker's engine.

    engine: None for unknown. source: who says so, "" if nobody does. reason: why the engine or its
    arguments are unknown, or what else the worker says than is configured; "" if none of these.
    arguments: SGLang's, None if unknown or another engine's. drafts: whether it may run a draft
    model, by its metrics.
    """

    engine: Engine | None
    source: str
    reason: str
    arguments: PromptArguments | None
    drafts: bool = False

    def as_json(self) -> dict[str, Any]:
        """Returns the part of GET /workers about a worker's engine."""
        engine, arguments = self.engine, self.arguments
        by_source = {"source": self.source}
        return {
            "engine": engine
            and {
                "name": engine.name,
                "version": str(engine.release),
                "frontend": engine.front_end,
            }
            | by_source,
            "engine_reason": self.reason,
            "engine_arguments": arguments and arguments._asdict(),
        }


def identity_of(given: WorkerEngine | None, source: str, answer: EngineAnswer) -> EngineRecord:
    """Returns what is known of a worker's engine.

    given: as it was configured or annotated, which counts more than what the worker said. source:
    who gave that.
    """
    engine = answer.engine if given is None else _with_front_end(given, answer.engine)
    is_sglang = engine is not None and engine.name == SGLANG
    arguments = answer.arguments if is_sglang else None
    drafts = bool(answer.drafts)
    if given is None:
        return EngineRecord(engine, LEARNED if engine else "", answer.reason, arguments, drafts)
    reason = ""
    if answer.engine not in (None, engine):
        reason = f"the worker says that it is {answer.engine}"
    elif is_sglang and arguments is None:
        reason = f"its arguments are unknown: {answer.reason}"
    return EngineRecord(engine, source, reason, arguments, drafts)


def _with_front_end(given: WorkerEngine, reported: Engine | None) -> Engine | None:
    """Returns a configured engine; its front end is the worker's own word where none is given."""
    engine = given.engine
    if (
        engine is None
        or given.frontend is not None
        or reported is None
        or reported.name != engine.name
    ):
        return engine
    return engine._replace(front_end=reported.front_end)
