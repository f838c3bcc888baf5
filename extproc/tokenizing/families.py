"""Families of models whose conversations engines render in code, and how each is loaded here.

A family is found by the architectures in config.json, or by a model's files. A model of none has a
chat template. To add a family: a renderer in a module of `extproc.renderers`, and a loader here,
which imports it, so that a router has only those of its models.
"""

import logging
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from extproc.base.tokenizer_files import read_file
from extproc.renderers.refusing import RefusingRenderer
from extproc.renderers.renderer import Renderer
from extproc.renderers.segments import ControlMarks
from extproc.tokenizing.segment_encoder import OrdinaryEncoder, segment_texts
from extproc.tokenizing.text_encoder import Encoder, TextEncoder
from extproc.tokenizing.tokenizer_layout import read
from extproc.tokenizing.vocabulary import Vocabulary

log = logging.getLogger("kvsteer.tokens")


class InCode(NamedTuple):
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
Loader = Callable[[ModelFiles], InCode]


def refused(reason: str) -> InCode:
    """Returns how a model is loaded whose conversations cannot be rendered here.

    reason: under which its conversations are counted; docs/requests.md explains each.
    """
    return InCode(RefusingRenderer(reason))


def _unknown(_: ModelFiles) -> InCode:
    return refused("no_chat_template")


def _gpt_oss(model: ModelFiles) -> InCode:
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
    return InCode(harmony, texts, lambda: harmony.start_forms)


def _kimi_k3(model: ModelFiles) -> InCode:
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
    return InCode(kimi_k3.KimiK3(controls, marks), texts)


def _deepseek_v32(_: ModelFiles) -> InCode:
    from extproc.renderers.deepseek_v32 import DeepSeekV32

    return InCode(DeepSeekV32())


def _deepseek_v4(_: ModelFiles) -> InCode:
    from extproc.renderers.deepseek_v4 import DeepSeekV4

    return InCode(DeepSeekV4())


def _deepseek_v41(_: ModelFiles) -> InCode:
    from extproc.renderers.deepseek_v4 import DeepSeekV41

    return InCode(DeepSeekV41())


_BY_ARCHITECTURE: Mapping[str, Loader] = {
    "GptOssForCausalLM": _gpt_oss,
    "DeepseekV32ForCausalLM": _deepseek_v32,
    "DeepseekV4ForCausalLM": _deepseek_v4,
    "DeepseekV4ForConditionalGeneration": _deepseek_v4,
    "DeepseekV41ForCausalLM": _deepseek_v41,
    "MoonshotKimiaForCausalLM": _unknown,
    "KimiK3ForConditionalGeneration": _kimi_k3,
    "InklingForCausalLM": _unknown,
    "InklingForConditionalGeneration": _unknown,
}


def _mistral(model: ModelFiles) -> InCode:
    """Loads a model whose conversations Mistral's library renders, by its vocabulary's version."""
    from extproc.renderers.mistral import Mistral

    vocabulary = model.vocabulary
    marks = ControlMarks(vocabulary.controls.values())
    renderer = Mistral(vocabulary.version, vocabulary.controls, marks, vocabulary.settings)
    return InCode(renderer, segment_texts(model.encoder, marks, model.max_known_bytes))


def in_code(model: ModelFiles) -> InCode | None:
    """Returns how a model's conversations are rendered in code; None if a chat template does it.

    Raises:
        OSError, ValueError: a file of the model cannot be used.
    """
    name = _family_of(model.config)
    if name is not None:
        return _BY_ARCHITECTURE[name](model)
    return _mistral(model) if model.vocabulary.version else None


def needs_no_template(config: Mapping[str, Any], vocabulary: Path) -> bool:
    """Returns whether a model's conversations are rendered in code. vocabulary: its file."""
    return _family_of(config) is not None or vocabulary.name.startswith(_OF_MISTRAL)


# How the files begin whose conversations Mistral's library renders.
_OF_MISTRAL = ("tekken.json", "tokenizer.model.v")


def _family_of(config: Mapping[str, Any]) -> str | None:
    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else ()
    return next((one for one in names if isinstance(one, str) and one in _BY_ARCHITECTURE), None)
