"""How an engine's release turns bodies into prompts: one dialect for each range of releases.

A dialect holds only rules on which releases differ; what all of them do alike is code elsewhere.
Where a request comes under such a rule, its prompt is of a form of its own
(`extproc.requests.prompt`), which counts as certain only once it is proved for a worker.

An engine's Rust front end is another reader of the same bodies: it has a dialect of its own,
whatever the release, and each of its conversations counts only once it is proved.

Sources: vLLM 0.10.2, 0.14.1, 0.19.1, 0.24.0 to 0.33.0 (chat_utils.py, renderers/hf.py,
anthropic/serving.py, openai/responses/utils.py and protocol.py, tool_parsers/utils.py). SGLang has
conversions of its own, and a table of its own (`sglang_rules`).
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from extproc.base.engine import (
    PYTHON,
    RUST,
    SGLANG,
    TRTLLM,
    VLLM,
    Engine,
    PromptArguments,
    Release,
)
from extproc.requests.sglang_rules import SGLANG_RANGES, SglangRules, with_arguments


class InlineSystem(Enum):
    """Where system turns among the messages of Anthropic's API go."""

    REFUSED = "refused"  # the engine answers 400
    MERGED = "merged"  # into the first system turn, unless the operator's own template keeps them
    PROBED = "probed"  # they stay, unless the template raises for a later system turn


class Reasoning(Enum):
    """From which keys of a turn its reasoning is read; templates get it under both."""

    IGNORED = "ignored"
    EITHER = "either"  # `reasoning` unless it is empty, else `reasoning_content`
    ONLY_REASONING = "only reasoning"
    RENAMED = "renamed"  # `reasoning` unless it is missing, else `reasoning_content`


class Effort(Enum):
    """What templates get of an effort."""

    IGNORED = "ignored"
    PASSED = "passed"  # reasoning_effort
    SWITCHES = "switches"  # and enable_thinking, false for "none", unless the request sets it


class Format(Enum):
    """The rule that finds whether a template expects parts (`extproc.templates`)."""

    OLDEST = "oldest"
    NEWER = "newer"
    RECENT = "recent"
    NEWEST = "newest"


class GivenIdsRule(Enum):
    """What becomes of the token ids that a request brings for its conversation (`given_ids`)."""

    IGNORED = "ignored"
    TAKEN = "taken"  # whatever else the request holds, unless there are none
    CHECKED = "checked"  # ignored with `echo` and with parts that are no text; refused if wrong


class Printed(Enum):
    """The fields of a function in Responses' tools that templates get.

    Those of the OpenAI library's type, from one of its releases on; or as chat completions.
    """

    OPENAI_2_0 = "OpenAI 2.0"
    OPENAI_2_25 = "OpenAI 2.25"
    OPENAI_2_50 = "OpenAI 2.50"
    OPENAI_3_8 = "OpenAI 3.8"
    AS_CHAT = "as chat completions"


# The likeliest of them first: those that were current while vLLM printed tools by its library.
BY_LIBRARY = (Printed.OPENAI_2_25, Printed.OPENAI_2_50, Printed.OPENAI_3_8, Printed.OPENAI_2_0)


class ToolFields(Enum):
    """The fields of a chat completion's tools that templates get (`function_tools`)."""

    NAMED = "that the engine's models name"
    ALL = "all; those that the models do not name come last"
    ALL_WITHOUT_FLAGS = "all; the models name neither `strict` nor `defer_loading`"


class Dialect(msgspec.Struct, frozen=True, gc=False):
    """The rules of a range of releases."""

    # The name by which it is shown.
    name: str
    # Where system turns among the messages of Anthropic's API go.
    inline_system: InlineSystem = InlineSystem.PROBED
    # From which keys of a turn its reasoning is read.
    reasoning: Reasoning = Reasoning.RENAMED
    # What templates of chat completions get of an effort.
    effort: Effort = Effort.SWITCHES
    # What those of responses get of it.
    responses_effort: Effort = Effort.SWITCHES
    # What those of Anthropic's messages get of it.
    messages_effort: Effort = Effort.SWITCHES
    # The rule that finds whether a template expects parts.
    format: Format = Format.NEWEST
    # The fields of a function in Responses' tools that templates get.
    tools: Printed = Printed.AS_CHAT
    # Whether a developer's turn becomes a system turn where the template knows no such role, and
    # all system turns become one, with blank lines between.
    merges_developers: bool = True
    # Whether templates get the other fields of text parts.
    keeps_part_fields: bool = True
    # Whether the first line of a system turn is left out if it is a client's billing header.
    drops_billing_line: bool = True
    # Whether `thinking: disabled` sets an effort; which one, the template decides.
    turns_off_thinking: bool = True
    # Whether tokenizing a response's text adds special tokens.
    adds_special_tokens: bool = True
    # Whether the functions of a response's namespace are tools of their own.
    flattens_namespaces: bool = True
    # Whether a response's items that are one turn of the model become one message.
    merges_turns: bool = True
    # Whether so do texts of the model that are no output message.
    merges_texts: bool = True
    # Whether custom tools become functions with one text.
    takes_custom_tools: bool = True
    # The fields of a chat completion's tools that templates get.
    tool_fields: ToolFields = ToolFields.NAMED
    # Whether templates of Anthropic's messages and of responses get `chat_template_kwargs`.
    takes_arguments: bool = True
    # Whether they get them without those that are null or "auto".
    drops_unset: bool = True
    # Whether Responses' templates get tools although tool_choice is "none", by default.
    keeps_tools_for_none: bool = True
    # What becomes of token ids that a request brings.
    given_ids: GivenIdsRule = GivenIdsRule.CHECKED
    # Whether a call's arguments that are no JSON object become an empty one.
    empties_arguments: bool = True
    # Whether --tokenizer-mode is "mistral" by itself where the files are Mistral's.
    takes_mistral: bool = True
    # Whether DeepSeek V4.1's code takes results of tools alone for a question.
    results_are_questions: bool = False
    # Whether the engine has conversions of its own, which are not held here: only conversations of
    # texts that end with the user's turn are known to be alike.
    is_foreign: bool = False
    # Whether the worker was started with another template, or with arguments for it, so that no
    # conversation is keyed.
    has_own_template: bool = False
    # Whether the engine's Rust front end reads the requests: of conversations, only vLLM's chat
    # completions are known, by rules that replace all others (`rust_chat`).
    is_rust: bool = False
    # SGLang's rules, which replace all others; None for other engines.
    sglang: SglangRules | None = None

    @property
    def is_vllms(self) -> bool:
        """Whether it is one of vLLM's, which pass plain messages to templates as they are."""
        is_own = self.is_foreign or self.has_own_template or self.is_rust
        return self.sglang is None and not is_own

    @property
    def reads_odd_json(self) -> bool:
        """Whether bodies are read by Python's json (`odd_json`), not by a strict decoder."""
        return not self.is_rust and (self.sglang is None or not self.sglang.reads_strictly)


class _Range(NamedTuple):
    """A dialect, and the engine, first release and front end that speak it."""

    engine: str
    since: Release
    dialect: Dialect
    front_end: str = PYTHON


_VLLM_033 = Dialect("vLLM 0.33")
_VLLM_032 = msgspec.structs.replace(
    _VLLM_033, name="vLLM 0.32", format=Format.RECENT, results_are_questions=True
)
_VLLM_031 = msgspec.structs.replace(
    _VLLM_032,
    name="vLLM 0.31",
    drops_billing_line=False,
    takes_custom_tools=False,
    given_ids=GivenIdsRule.TAKEN,
)
_VLLM_030 = msgspec.structs.replace(
    _VLLM_031,
    name="vLLM 0.30",
    inline_system=InlineSystem.MERGED,
    turns_off_thinking=False,
)
_VLLM_029 = msgspec.structs.replace(_VLLM_030, name="vLLM 0.29", format=Format.NEWER)
_VLLM_027 = msgspec.structs.replace(_VLLM_029, name="vLLM 0.27 and 0.28", empties_arguments=False)
_VLLM_026 = msgspec.structs.replace(
    _VLLM_027,
    name="vLLM 0.26",
    tools=BY_LIBRARY[0],
    tool_fields=ToolFields.ALL,
    keeps_tools_for_none=False,
    given_ids=GivenIdsRule.IGNORED,
)
_VLLM_025 = msgspec.structs.replace(_VLLM_026, name="vLLM 0.25", keeps_part_fields=False)
_VLLM_024 = msgspec.structs.replace(
    _VLLM_025, name="vLLM 0.24", merges_texts=False, flattens_namespaces=False
)
_VLLM_019 = msgspec.structs.replace(
    _VLLM_024,
    name="vLLM 0.19 to 0.23",
    tool_fields=ToolFields.ALL_WITHOUT_FLAGS,
    takes_arguments=False,
    inline_system=InlineSystem.REFUSED,
    reasoning=Reasoning.ONLY_REASONING,
    effort=Effort.PASSED,
    responses_effort=Effort.PASSED,
    messages_effort=Effort.IGNORED,
    format=Format.OLDEST,
    merges_developers=False,
)
_VLLM_014 = msgspec.structs.replace(
    _VLLM_019,
    name="vLLM 0.14 to 0.18",
    drops_unset=False,
    reasoning=Reasoning.EITHER,
    responses_effort=Effort.IGNORED,
    adds_special_tokens=False,
    merges_turns=False,
)
_VLLM_OLD = msgspec.structs.replace(
    _VLLM_014,
    name="vLLM before 0.14",
    reasoning=Reasoning.IGNORED,
    effort=Effort.IGNORED,
    takes_mistral=False,
)

_VLLM_RUST = msgspec.structs.replace(
    _VLLM_033, name="vLLM 0.33, Rust front end", takes_mistral=False, is_rust=True
)

NEWEST = _VLLM_033
_SGLANG_OLD = Dialect("SGLang before 0.5.9", is_foreign=True)
_SGLANG_OWN = Dialect(
    "SGLang with a template or parsers of its own", is_foreign=True, has_own_template=True
)
_SGLANG_RUST = Dialect("SGLang, Rust front end", is_foreign=True, is_rust=True)
_TRTLLM = Dialect("TensorRT-LLM", is_foreign=True, takes_mistral=False)

# Which dialect an engine speaks from a release on, oldest first.
_RANGES: Sequence[_Range] = (
    _Range(SGLANG, Release(0, 0), _SGLANG_RUST, RUST),
    _Range(VLLM, Release(0, 0), _VLLM_RUST, RUST),
    _Range(SGLANG, Release(0, 0), _SGLANG_OLD),
    *(_Range(SGLANG, since, Dialect(name, sglang=rules)) for since, name, rules in SGLANG_RANGES),
    _Range(TRTLLM, Release(0, 0), _TRTLLM),
    _Range(VLLM, Release(0, 0), _VLLM_OLD),
    _Range(VLLM, Release(0, 14), _VLLM_014),
    _Range(VLLM, Release(0, 19), _VLLM_019),
    _Range(VLLM, Release(0, 24), _VLLM_024),
    _Range(VLLM, Release(0, 25), _VLLM_025),
    _Range(VLLM, Release(0, 26), _VLLM_026),
    _Range(VLLM, Release(0, 27), _VLLM_027),
    _Range(VLLM, Release(0, 29), _VLLM_029),
    _Range(VLLM, Release(0, 30), _VLLM_030),
    _Range(VLLM, Release(0, 31), _VLLM_031),
    _Range(VLLM, Release(0, 32), _VLLM_032),
    _Range(VLLM, Release(0, 33), _VLLM_033),
)

_ORDER = [one.dialect for one in _RANGES]


class ModelDialects(NamedTuple):
    """The dialects that a model's workers speak.

    first: the newest. rest: the rest, each with the workers that speak it; empty unless engines
    differ, as during an upgrade. differs_by_engine: whether the workers run engines of several
    kinds, which agree on less than releases of one do.
    """

    first: Dialect
    rest: tuple[tuple[Dialect, frozenset[str]], ...] = ()
    differs_by_engine: bool = False


# Returns the dialect in which a request for a model, as the client named it, is read first.
DialectFor = Callable[[str | None], Dialect | None]


def dialect_of(engine: Engine | None) -> Dialect:
    """Returns the dialect of an engine.

    An unknown engine, and a release newer than the table, get the newest one: it counts only where
    it is proved.
    """
    if engine is None:
        return NEWEST
    matching = [
        one
        for one in _RANGES
        if one.engine == engine.name
        and one.front_end == engine.front_end
        and one.since <= engine.release
    ]
    return matching[-1].dialect if matching else NEWEST


def model_dialects(
    engines: Mapping[str, Engine | None],
    own_template: Collection[str] = (),
    arguments: Mapping[str, PromptArguments] = MappingProxyType({}),
    printed: Mapping[str, Printed] = MappingProxyType({}),
    keywords: Mapping[str, Any] = MappingProxyType({}),
) -> ModelDialects:
    """Returns the dialects of a model's workers.

    engines: by the workers' names, None where it is unknown. own_template: the workers of SGLang
    that were started with another template than the model's, or with arguments for it. arguments:
    those of SGLang's workers, as far as they are known. printed: how the tools of responses are
    printed, for workers that have shown another way than the likeliest. keywords: the model's
    configured arguments for templates.
    """
    speakers: dict[Dialect, set[str]] = {}
    ranks: dict[Dialect, int] = {}
    for worker, engine in engines.items():
        dialect = dialect_of(engine)
        rank = _ORDER.index(dialect)
        if worker in own_template:
            dialect, rank = _SGLANG_OWN, -1
        elif dialect.sglang is not None:
            dialect = _of_worker(dialect, dialect.sglang, arguments.get(worker), keywords)
        elif dialect.tools in BY_LIBRARY and worker in printed:
            dialect = msgspec.structs.replace(dialect, tools=printed[worker])
        speakers.setdefault(dialect, set()).add(worker)
        ranks[dialect] = rank
    newest_first = sorted(speakers, key=ranks.__getitem__, reverse=True)
    if not newest_first:
        return ModelDialects(NEWEST)
    first, *others = newest_first
    kinds = {(one.is_foreign, one.sglang is not None, one.is_rust) for one in speakers}
    by_dialect = tuple((one, frozenset(speakers[one])) for one in others)
    return ModelDialects(first, by_dialect, len(kinds) > 1)


def _of_worker(
    dialect: Dialect,
    rules: SglangRules,
    arguments: PromptArguments | None,
    keywords: Mapping[str, Any],
) -> Dialect:
    """Returns the dialect of a worker of SGLang, which its arguments change."""
    own = with_arguments(rules, arguments, keywords)
    if own is None:
        return _SGLANG_OWN
    return dialect if own is rules else msgspec.structs.replace(dialect, sglang=own)


def rivals_of(dialect: Dialect) -> Sequence[Dialect]:
    """Returns the dialects that a worker may speak instead, whose release decides less than all.

    The next ones to try come first.
    """
    if dialect.tools not in BY_LIBRARY:
        return ()
    at = BY_LIBRARY.index(dialect.tools) + 1
    others = (*BY_LIBRARY[at:], *BY_LIBRARY[: at - 1])
    return [msgspec.structs.replace(dialect, tools=one) for one in others]


def agreed(_: str | None) -> None:
    """Returns no dialect: only what all releases do alike is read."""
