"""The chat templates among a model's files, and which of them a request gets.

Sources: transformers (the files it saves and reads, get_chat_template) and vLLM 0.32.0 (which asks
the processor's template first, unless there are tools; and its renderers for some kinds of models).
"""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from extproc.errors import RequestError
from extproc.requests.message_shapes import Messages
from extproc.templates.chat_template import BUDGET_SECONDS, ChatTemplate

_SPECIAL_TOKENS = tuple(
    f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)

# Architectures (config.json) whose prompts vLLM builds in code, not by a template.
_RENDERED_IN_CODE = frozenset(
    (
        *("GptOssForCausalLM", "DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM"),
        *("DeepseekV4ForConditionalGeneration", "DeepseekV41ForCausalLM"),
        *("MoonshotKimiaForCausalLM", "KimiK3ForConditionalGeneration"),
        *("InklingForCausalLM", "InklingForConditionalGeneration"),
    )
)

# With one of these beside it, vLLM takes Mistral's own tokenizer and templates.
_MISTRAL_FILES = ("tekken.json", "tokenizer.model.v*")


class ChatTemplates:
    """A model's chat templates by name; `render` takes the one an engine would.

    named: "default" and "tool_use" are known to engines; "processor" is ours, for the template of
        a multimodal model's processor where it is another.
    """

    def __init__(self, named: Mapping[str, ChatTemplate]) -> None:
        self._named = named

    def render(
        self,
        messages: Messages,
        variables: Mapping[str, Any],
        *,
        has_reasoning_effort: bool = False,
        budget_seconds: float = BUDGET_SECONDS,
    ) -> str:
        """Returns the prompt text of a conversation, as `ChatTemplate.render`."""
        return self._chosen(variables).render(
            messages,
            variables,
            has_reasoning_effort=has_reasoning_effort,
            budget_seconds=budget_seconds,
        )

    def render_until_media(
        self,
        messages: Messages,
        variables: Mapping[str, Any],
        *,
        added_tokens: Collection[str],
        has_reasoning_effort: bool = False,
    ) -> str:
        """Returns its certain part before media, as `ChatTemplate.render_until_media`."""
        return self._chosen(variables).render_until_media(
            messages,
            variables,
            added_tokens=added_tokens,
            has_reasoning_effort=has_reasoning_effort,
        )

    def _chosen(self, variables: Mapping[str, Any]) -> ChatTemplate:
        special = "processor" if variables.get("tools") is None else "tool_use"
        template = self._named.get(special) or self._named.get("default")
        if template is None:
            raise RequestError("no_chat_template")
        return template


def load(directory: Path, override: Path | None = None) -> ChatTemplates:
    """Loads the chat templates in a model's directory.

    override: a template that the operator gave instead, to the engine as well. It makes no
        difference where the engine builds prompts in code.

    Raises:
        OSError, ValueError: a file cannot be read, or holds no template.
    """
    settings = _json(directory / "tokenizer_config.json")
    special_tokens = {
        name: text for name in _SPECIAL_TOKENS if (text := _text(settings.get(name))) is not None
    }
    if _is_rendered_in_code(directory):
        return ChatTemplates({})
    sources = {"default": override.read_text("utf-8")} if override else _sources(directory)
    compiled = {source: ChatTemplate(source, special_tokens) for source in set(sources.values())}
    return ChatTemplates({name: compiled[source] for name, source in sources.items()})


def _is_rendered_in_code(directory: Path) -> bool:
    architectures = _json(directory / "config.json").get("architectures")
    if isinstance(architectures, list) and not _RENDERED_IN_CODE.isdisjoint(architectures):
        return True
    return any(True for pattern in _MISTRAL_FILES for _ in directory.glob(pattern))


def _sources(directory: Path) -> dict[str, str]:
    files = _files(directory)
    if files:
        return files
    named = _settings_templates(_json(directory / "tokenizer_config.json").get("chat_template"))
    processor = _json(directory / "chat_template.json").get("chat_template")
    return {**named, "processor": processor} if isinstance(processor, str) else named


def _files(directory: Path) -> dict[str, str]:
    """Templates in files of their own; where there are any, settings hold none that counts."""
    more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    found = {path.stem: path.read_text("utf-8") for path in more}
    default = directory / "chat_template.jinja"
    return {**found, "default": default.read_text("utf-8")} if default.is_file() else found


def _settings_templates(entry: object) -> dict[str, str]:
    """The entry in tokenizer_config.json: one text, or a list with a name each."""
    if isinstance(entry, str):
        return {"default": entry}
    if not isinstance(entry, list):
        return {}
    try:
        return {str(item["name"]): str(item["template"]) for item in entry}
    except (KeyError, TypeError):
        raise ValueError("tokenizer_config.json: chat_template is no template") from None


def _json(path: Path) -> dict[str, Any]:
    values = json.loads(path.read_bytes()) if path.is_file() else {}
    return values if isinstance(values, dict) else {}


def _text(token: object) -> str | None:
    """A special token's text, given as text or as an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None
