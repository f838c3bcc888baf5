"""Families of models whose conversations engines render in code, and how each is loaded here.

A family is found by the architectures in config.json, or by a model's files. A model of none has a
chat template. To add a family: a renderer in a module of `extproc.renderers`, and a loader here.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from extproc.renderers.refusing import RefusingRenderer
from extproc.renderers.renderer import Renderer
from extproc.tokenizing.text_encoder import TextEncoder


class InCode(NamedTuple):
    """How the conversations of a model are rendered in code, and tokenized.

    texts: tokenizes what the renderer's marks joined (`segment_encoder.segment_texts`); None if the
        renderer has no marks, so that tokenizer.json serves.
    """

    renderer: Renderer
    texts: TextEncoder | None = None


class ModelFiles(NamedTuple):
    """A model as a loader sees it. name: in messages. config: of config.json."""

    name: str
    directory: Path
    config: Mapping[str, Any]


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


_BY_ARCHITECTURE: Mapping[str, Loader] = {
    "GptOssForCausalLM": _unknown,
    "DeepseekV32ForCausalLM": _unknown,
    "DeepseekV4ForCausalLM": _unknown,
    "DeepseekV4ForConditionalGeneration": _unknown,
    "DeepseekV41ForCausalLM": _unknown,
    "MoonshotKimiaForCausalLM": _unknown,
    "KimiK3ForConditionalGeneration": _unknown,
    "InklingForCausalLM": _unknown,
    "InklingForConditionalGeneration": _unknown,
}

# If one of these files is present, vLLM uses Mistral's own tokenizer and templates.
_MISTRAL_FILES = ("tekken.json", "tokenizer.model.v*")


def in_code(model: ModelFiles) -> InCode | None:
    """Returns how a model's conversations are rendered in code; None if a chat template does it.

    Raises:
        OSError, ValueError: a file of the model cannot be used.
    """
    architectures = model.config.get("architectures")
    for name in architectures if isinstance(architectures, list) else ():
        if isinstance(name, str) and name in _BY_ARCHITECTURE:
            return _BY_ARCHITECTURE[name](model)
    if any(True for pattern in _MISTRAL_FILES for _ in model.directory.glob(pattern)):
        return _unknown(model)
    return None
