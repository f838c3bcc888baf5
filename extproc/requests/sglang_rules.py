"""How SGLang's releases turn bodies into prompts: its conversions are its own.

Sources: srt/entrypoints (openai/protocol.py, serving_chat.py, serving_responses.py,
anthropic/serving.py) and srt/parser (reasoning_parser.py, jinja_template_utils.py) of SGLang 0.5.9
to 0.5.23, of which each release was searched for each of these rules. Those of 0.5.23 were run and
compared; the others are read.
"""

from collections.abc import Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from extproc.base.engine import PromptArguments, Release


class Switches(Enum):
    """When an effort sets `thinking` and `enable_thinking`, which templates read."""

    UNSET = "unset"
    OFF = "for none only"
    ALWAYS = "always"


class Wrapping(NamedTuple):
    """How a reasoning parser marks what a model thought, and what it thinks of by default.

    mode: "always" for a model that always thinks; "mistral" for an effort; else the template's
    argument that switches thinking.
    """

    before: str
    after: str
    mode: str


class SglangRules(msgspec.Struct, frozen=True, gc=False):
    """The rules of a range of SGLang's releases, for one worker."""

    # Whether messages and responses are read in full; before, only plain texts are alike.
    converts: bool = True
    # What templates get where a request sets no effort.
    default_effort: str = ""
    # What an effort sets.
    switches: Switches = Switches.ALWAYS
    # Whether the keys of functions stay as clients wrote them, and unset ones are left out; before,
    # all are printed in one order.
    keeps_tool_order: bool = True
    # Whether tools have `defer_loading`.
    prints_deferral: bool = True
    # Whether the texts of a tool's result are joined by spaces, whatever the template takes.
    joins_tool_texts: bool = True
    # Whether a developer's turn in a response begins with a label.
    labels_developers: bool = True
    # Whether custom tools become functions with one text, and reasoning that comes back is read.
    takes_custom_tools: bool = True
    # Whether the parts of a tool's output in a response are one text.
    joins_outputs: bool = True
    # Whether references to tools, in a tool's result in messages, are turns of their own.
    splits_references: bool = True
    # Whether a model's turn may name its phase.
    keeps_phases: bool = True
    # Whether a turn with a phase is added to reasoning before it, else only to a turn of the same
    # phase.
    adds_to_reasoning: bool = True
    # Whether turns may have a `prefix`.
    keeps_prefixes: bool = True
    # Whether tools in messages may be `strict`.
    takes_strict: bool = True
    # Whether responses keep later system turns, where the template renders them.
    keeps_system_turns: bool = True
    # Whether this model's conversations are changed (`extproc.templates.minimax_m3`).
    changes_minimax_m3: bool = True
    # Whether bodies are read by orjson, which refuses what `odd_json` is about.
    reads_strictly: bool = True
    # The name of the worker's reasoning parser, None if it has none.
    reasoning_parser: str = ""
    # How that parser marks thoughts, None without one.
    wrapping: Wrapping | None = None
    # As in `PromptArguments`.
    enable_multimodal: bool | None = None
    # The JSON of the worker's own arguments for templates, if they are known and others than the
    # configured ones; else None.
    keywords: str | None = None


_0_5_23 = SglangRules()
_0_5_22 = msgspec.structs.replace(
    _0_5_23,
    keeps_tool_order=False,
    adds_to_reasoning=False,
    keeps_prefixes=False,
    takes_strict=False,
    changes_minimax_m3=False,
)
_0_5_20 = msgspec.structs.replace(_0_5_22, keeps_system_turns=False)
_0_5_17 = msgspec.structs.replace(
    _0_5_20, labels_developers=False, takes_custom_tools=False, keeps_phases=False
)
_0_5_16 = msgspec.structs.replace(
    _0_5_17, joins_outputs=False, splits_references=False, reads_strictly=False
)
_0_5_11 = msgspec.structs.replace(_0_5_16, converts=False, switches=Switches.OFF)
_0_5_10 = msgspec.structs.replace(_0_5_11, prints_deferral=False, joins_tool_texts=False)
_0_5_9 = msgspec.structs.replace(_0_5_10, switches=Switches.UNSET, default_effort="medium")

# Which rules hold from a release on, oldest first. Older releases are not known.
SGLANG_RANGES: Sequence[tuple[Release, str, SglangRules]] = (
    (Release(0, 5, 9), "SGLang 0.5.9", _0_5_9),
    (Release(0, 5, 10), "SGLang 0.5.10", _0_5_10),
    (Release(0, 5, 11), "SGLang 0.5.11 to 0.5.15", _0_5_11),
    (Release(0, 5, 16), "SGLang 0.5.16", _0_5_16),
    (Release(0, 5, 17), "SGLang 0.5.17 to 0.5.19", _0_5_17),
    (Release(0, 5, 20), "SGLang 0.5.20 and 0.5.21", _0_5_20),
    (Release(0, 5, 22), "SGLang 0.5.22", _0_5_22),
    (Release(0, 5, 23), "SGLang 0.5.23", _0_5_23),
)

_THINK, _END = "<think>", "</think>"

# By the names of reasoning parsers. Those that are missing need the model's own code.
_WRAPPINGS: Mapping[str, Wrapping] = {
    "cohere_command4": Wrapping("<|START_THINKING|>", "<|END_THINKING|>", "always"),
    "deepseek-r1": Wrapping(_THINK, _END, "always"),
    "deepseek-v3": Wrapping(_THINK, _END, "thinking"),
    "dots": Wrapping(_THINK, _END, "enable_thinking"),
    "gemma4": Wrapping("<|channel>thought\n", "<channel|>", "enable_thinking"),
    "gigachat35": Wrapping(_THINK, _END, "always"),
    "glm45": Wrapping(_THINK, _END, "enable_thinking"),
    "granite_thinking_parser": Wrapping(_THINK, _END, "enable_thinking"),
    "hunyuan": Wrapping(_THINK, _END, "always"),
    "interns1": Wrapping(_THINK, _END, "enable_thinking"),
    "kimi": Wrapping("◁think▷", "◁/think▷", "always"),
    "kimi_k2": Wrapping(_THINK, _END, "thinking"),
    "ling3": Wrapping(_THINK, _END, "enable_thinking"),
    "mimo": Wrapping(_THINK, _END, "enable_thinking"),
    "minimax": Wrapping(_THINK, _END, "enable_thinking"),
    "minimax-append-think": Wrapping(_THINK, _END, "always"),
    "minimax-m3": Wrapping("<mm:think>", "</mm:think>", "always"),
    "mistral": Wrapping("[THINK]", "[/THINK]", "mistral"),
    "nanbeige": Wrapping(_THINK, _END, "enable_thinking"),
    "nemotron_3": Wrapping(_THINK, _END, "enable_thinking"),
    "poolside_v1": Wrapping(_THINK, _END, "enable_thinking"),
    "qwen3": Wrapping(_THINK, _END, "enable_thinking"),
    "qwen3-thinking": Wrapping(_THINK, _END, "enable_thinking"),
    "step3": Wrapping(_THINK, _END, "always"),
    "step3p5": Wrapping(_THINK, _END, "always"),
}

# Parsers of tool calls with which the engine renders conversations in code.
_RENDERS_IN_CODE = frozenset(("deepseekv32", "deepseekv4", "deepseekv41", "kimi_k3", "muse"))


def with_arguments(
    rules: SglangRules,
    arguments: PromptArguments | None,
    keywords: Mapping[str, Any] = MappingProxyType({}),
) -> SglangRules | None:
    """Returns the rules of a worker that was started with these arguments.

    keywords: the configured arguments for templates.

    None if its parsers render conversations in code, or in a way that is not known here. Arguments
    that are not known are taken for absent ones: what they change must be proved.
    """
    if arguments is None:
        return rules
    if arguments.tool_call_parser in _RENDERS_IN_CODE:
        return None
    own = arguments.default_chat_template_kwargs or "{}"
    if msgspec.json.decode(own) != keywords:
        rules = msgspec.structs.replace(rules, keywords=own)
    if arguments.enable_multimodal is not None:
        rules = msgspec.structs.replace(rules, enable_multimodal=arguments.enable_multimodal)
    if not arguments.reasoning_parser:
        return rules
    wrapping = _WRAPPINGS.get(arguments.reasoning_parser)
    if wrapping is None:
        return None
    return msgspec.structs.replace(
        rules, reasoning_parser=arguments.reasoning_parser, wrapping=wrapping
    )
