"""Families of models for whose conversations engines or checkpoints have code, in one table.

A family is found by the architectures in config.json, or by the file of its vocabulary. A model of
none has a chat template. To add a family: a renderer in a module of `extproc.renderers`, a loader
here, which imports it, so that a router has only those of its models, and an entry of `FAMILIES`.

What an engine's own rules make of a model's conversations is with these (`sglang_template` for
SGLang's rules for MiniMax-M3): it changes with the engine's releases, not with the model.
"""

import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from extproc.base.tokenizer_files import read_file
from extproc.renderers.refusing import RefusingRenderer
from extproc.renderers.renderer import Renderer
from extproc.renderers.segments import ControlMarks
from extproc.requests.prompt import Chat
from extproc.tokenizing.kimi_chat import as_kimis
from extproc.tokenizing.segment_encoder import OrdinaryEncoder, segment_texts
from extproc.tokenizing.text_encoder import Encoder, TextEncoder
from extproc.tokenizing.tokenizer_layout import read
from extproc.tokenizing.vocabulary import Vocabulary

log = logging.getLogger("kvsteer.tokens")


class CodeRendering(NamedTuple):
    """How the conversations of a model are rendered in code, and tokenized.

    texts: tokenizes what the renderer's marks joined (`segment_encoder.segment_texts`); None if the
        renderer has no marks, so that tokenizer.json serves. start_forms: returns the form of
        today's conversations where a Rust front end writes the date of its start, 0 if it does not.
    """

    renderer: Renderer
    texts: TextEncoder | None = None
    start_forms: Callable[[], int] = lambda: 0


class ModelFiles(NamedTuple):
    """A model as a loader sees it.

    name: in messages. config: of config.json. vocabulary: which the engine uses. encoder: encodes
    texts with it. keeps_later_systems: returns whether vLLM 0.31 and later find that the model
    renders system turns after the first: they ask its template. max_known_bytes: memory for texts
    and their ids.
    """

    name: str
    directory: Path
    config: Mapping[str, Any]
    vocabulary: Vocabulary
    encoder: Encoder
    keeps_later_systems: Callable[[], bool]
    max_known_bytes: int


# Loads a family for a model; raises OSError or ValueError if a file cannot be used. A missing
# library is no error: the loader logs a warning that names the extra, and returns `refused`.
Loader = Callable[[ModelFiles], CodeRendering]

# Returns what the code of a checkpoint's tokenizer makes of a conversation before its template gets
# it, and the forms that this decides; raises RequestError if that is not known.
Prepare = Callable[[Chat], tuple[Chat, int]]


def refused(reason: str) -> CodeRendering:
    """Returns how a model is loaded whose conversations cannot be rendered here.

    reason: under which its conversations are counted; docs/internals/reasons.md has all.
    """
    return CodeRendering(RefusingRenderer(reason))


def _unknown(_: ModelFiles) -> CodeRendering:
    return refused("no_chat_template")


def _gpt_oss(model: ModelFiles) -> CodeRendering:
    """Loads gpt-oss. The engine has its vocabulary in a library; tokenizer.json holds the same."""
    from extproc.renderers.harmony import Harmony
    from extproc.renderers.harmony_format import CONTROLS

    source = read_file(model.directory / "tokenizer.json").decode()
    added = {token.content: token.id for token in read(source).added_tokens}
    if not CONTROLS.items() <= added.items():
        log.warning(
            "model %s: its tokenizer.json has other control tokens than gpt-oss", model.name
        )
        return refused("no_chat_template")
    marks = ControlMarks(CONTROLS.values())
    ordinary = OrdinaryEncoder(model.encoder, list(added))
    texts = segment_texts(ordinary, marks, model.max_known_bytes)
    harmony = Harmony(lambda: datetime.now().astimezone(), model.keeps_later_systems)
    return CodeRendering(harmony, texts, lambda: harmony.start_forms)


def _kimi_k3(model: ModelFiles) -> CodeRendering:
    """Loads Kimi K3. Its code tokenizes control tokens and each text between them by itself."""
    from extproc.renderers import kimi_k3

    library = model.vocabulary.library
    found = {name: library.token_to_id(name) for name in kimi_k3.CONTROLS}
    controls = {name: number for name, number in found.items() if number is not None}
    if model.vocabulary.kimi is None or len(controls) < len(found):
        log.warning("model %s: its vocabulary has not Kimi K3's control tokens", model.name)
        return refused("no_chat_template")
    marks = ControlMarks(controls.values())
    added = [token.content for token in library.get_added_tokens_decoder().values()]
    ordinary = OrdinaryEncoder(model.encoder, added)
    texts = segment_texts(ordinary, marks, model.max_known_bytes)
    return CodeRendering(kimi_k3.KimiK3(controls, marks), texts)


def _deepseek_v32(_: ModelFiles) -> CodeRendering:
    from extproc.renderers.deepseek_v32 import DeepSeekV32

    return CodeRendering(DeepSeekV32())


def _deepseek_v4(_: ModelFiles) -> CodeRendering:
    from extproc.renderers.deepseek_v4 import DeepSeekV4

    return CodeRendering(DeepSeekV4())


def _deepseek_v41(_: ModelFiles) -> CodeRendering:
    from extproc.renderers.deepseek_v4 import DeepSeekV41

    return CodeRendering(DeepSeekV41())


def _mistral(model: ModelFiles) -> CodeRendering:
    """Loads a model whose conversations Mistral's library renders, by its vocabulary's version."""
    from extproc.renderers.mistral import Mistral

    vocabulary = model.vocabulary
    marks = ControlMarks(vocabulary.controls.values())
    renderer = Mistral(vocabulary.version, vocabulary.controls, marks, vocabulary.settings)
    return CodeRendering(renderer, segment_texts(model.encoder, marks, model.max_known_bytes))


def _kimi(model: ModelFiles) -> Prepare:
    code = model.vocabulary.kimi
    assert code is not None, "only the code of the checkpoint says how such a vocabulary is used"
    return partial(as_kimis, code=code)


class Family(NamedTuple):
    """A family of models for whose conversations engines or checkpoints have code.

    matches: returns whether a model belongs to it, by its config.json and the name of its
    vocabulary's file. render: loads what renders its conversations; None if a chat template does.
    prepare: loads what changes them before their template gets them; None if nothing does.
    """

    matches: Callable[[Mapping[str, Any], str], bool]
    render: Loader | None = None
    prepare: Callable[[ModelFiles], Prepare] | None = None


def _named(*architectures: str) -> Callable[[Mapping[str, Any], str], bool]:
    def matches(config: Mapping[str, Any], _: str) -> bool:
        names = config.get("architectures")
        return isinstance(names, list) and any(one in architectures for one in names)

    return matches


def _in_files(*beginnings: str) -> Callable[[Mapping[str, Any], str], bool]:
    return lambda _, vocabulary: vocabulary.startswith(beginnings)


# The first that matches counts.
FAMILIES = (
    Family(_named("GptOssForCausalLM"), render=_gpt_oss),
    Family(_named("DeepseekV32ForCausalLM"), render=_deepseek_v32),
    Family(
        _named("DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration"), render=_deepseek_v4
    ),
    Family(_named("DeepseekV41ForCausalLM"), render=_deepseek_v41),
    Family(_named("KimiK3ForConditionalGeneration"), render=_kimi_k3),
    Family(
        _named("MoonshotKimiaForCausalLM", "InklingForCausalLM", "InklingForConditionalGeneration"),
        render=_unknown,
    ),
    Family(_in_files("tekken.json", "tokenizer.model.v"), render=_mistral),
    Family(_in_files("tiktoken.model"), prepare=_kimi),
)

NO_FAMILY = Family(lambda *_: True)


def family_of(config: Mapping[str, Any], vocabulary: str) -> Family:
    """Returns a model's family, `NO_FAMILY` for most. vocabulary: the name of its file."""
    return next((one for one in FAMILIES if one.matches(config, vocabulary)), NO_FAMILY)
