"""Turns prompts into token ids: exactly the engine's, or an error."""

import json
import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from extproc.config.schema import Model
from extproc.errors import RequestError, StartError
from extproc.requests.prompt import Chat, Prompt, Text
from extproc.templates.chat_template import BUDGET_SECONDS, ChatTemplate
from extproc.tokenizer_files import TokenizerFiles
from extproc.tokenizing.encoder_choice import NO_FRAME, Choice, choose, framed_ids
from extproc.tokenizing.text_encoder import Encoded
from extproc.tokenizing.tokenizer_layout import Frame
from kvstate.overlap import Tokens

log = logging.getLogger("kvsteer.tokens")

# Memory for a model's texts and their ids: enough for a thousand conversations of 32k tokens each.
MAX_KNOWN_BYTES = 256 * 1024 * 1024

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

# If one of these files is present, vLLM uses Mistral's own tokenizer and templates.
_MISTRAL_FILES = ("tekken.json", "tokenizer.model.v*")


class ChatTemplates:
    """A model's chat templates by name.

    named: "default" and "tool_use" are engines' names; "processor" is KVSteer's name for the
        template of a multimodal model's processor, if it differs.
    """

    def __init__(self, named: Mapping[str, ChatTemplate]) -> None:
        self._named = named

    def chosen(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """Returns the template that an engine would use for these variables.

        Raises:
            RequestError: there is none.
        """
        special = "processor" if variables.get("tools") is None else "tool_use"
        template = self._named.get(special) or self._named.get("default")
        if template is None:
            raise RequestError("no_chat_template")
        return template


def load(directory: Path, override: Path | None = None) -> ChatTemplates:
    """Loads the chat templates in a model's directory.

    override: a template that the operator also gave to the engine. It has no effect if the engine
        builds prompts in code.

    Raises:
        OSError, ValueError: a file cannot be read, or has no template.
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
    """Returns the templates in separate files; if there are any, those in settings are unused."""
    more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    found = {path.stem: path.read_text("utf-8") for path in more}
    default = directory / "chat_template.jinja"
    return {**found, "default": default.read_text("utf-8")} if default.is_file() else found


def _settings_templates(entry: object) -> dict[str, str]:
    """Returns the templates in tokenizer_config.json: one text, or a list with names."""
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
    """Returns a special token's text, given as text or as an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


class Started(msgspec.Struct, frozen=True, gc=False):
    """A prompt that is rendered and looked up, but not tokenized.

    new_characters: how many characters of its text are new.
    is_cheap: whether they are tokenized without a thread (see `Encoder.inline_characters`).
    finish: returns the token ids, which must not be changed, or raises RequestError; any thread may
        call it.
    """

    new_characters: int
    is_cheap: bool
    finish: Callable[[], Tokens]


class Tokenizer:
    """The tokenizer and chat templates of one model; safe to use from several threads."""

    def __init__(
        self, choice: Choice, templates: ChatTemplates, library: tokenizers.Tokenizer
    ) -> None:
        self._library = library
        self._texts = choice.texts
        self._frame = choice.frame
        self._whole = choice.whole
        self._added = frozenset(token.content for token in choice.added)
        self._templates = templates

    @classmethod
    def load(cls, model: Model) -> "Tokenizer | None":
        """Loads the tokenizer that a model's configuration names; None if it names no files.

        Raises:
            StartError: its files cannot be read.
        """
        if not isinstance(model.tokenizer, str):
            return None
        override = Path(model.chat_template) if model.chat_template is not None else None
        try:
            files = TokenizerFiles.find(model.tokenizer)
            tokenizer = tokenizers.Tokenizer.from_file(str(files.tokenizer))
            # leftovers of training in the file; engines switch both off
            tokenizer.no_truncation()
            tokenizer.no_padding()
            choice = choose(tokenizer, model.name, MAX_KNOWN_BYTES)
            return cls(choice, load(files.directory, override), tokenizer)
        except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
            raise StartError(f"model {model.name}: {model.tokenizer}: {error}") from None

    def encode(self, prompt: Prompt) -> Tokens:
        """Returns the token ids of a prompt, which must not be changed; for a chat with media, only
        those before it.

        Raises:
            RequestError: the chat template refuses it, the model has none, or its text cannot be
                tokenized with certainty.
        """
        return self.start(prompt).finish()

    def text_of(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids, including special tokens; invalid ids are left out.

        Only for golden requests: a user's text must not be shown anywhere.
        """
        return self._library.decode(list(tokens), skip_special_tokens=False)

    def start(self, prompt: Prompt, render_seconds: float = BUDGET_SECONDS) -> Started:
        """Renders a prompt, looks it up, and returns the rest of the work.

        render_seconds: how long the template may take.

        Raises:
            RequestError: as `encode`.
        """
        if isinstance(prompt, array):
            return Started(0, is_cheap=True, finish=lambda: prompt)
        if prompt.special_tokens_vary and self._frame != NO_FRAME:
            raise RequestError("unsupported_special_tokens")
        has_media = isinstance(prompt, Chat) and prompt.has_media
        text = prompt.text if isinstance(prompt, Text) else self._render(prompt, render_seconds)
        if prompt.add_special_tokens and self._frame is None:
            return self._start_whole(text, has_media=has_media)
        around = (self._frame or NO_FRAME) if prompt.add_special_tokens else NO_FRAME
        work = self._texts.begin(text)

        def finish() -> Tokens:
            encoded = self._texts.finish(work)
            if has_media:
                return _before_media(encoded, around)
            return framed_ids(encoded.ids, around)

        return Started(work.new_characters, self._texts.is_cheap(work.new_characters), finish)

    def _start_whole(self, text: str, *, has_media: bool) -> Started:
        if has_media:
            raise RequestError("unsupported_special_tokens")
        size = self._texts.begin(text).new_characters
        return Started(size, self._texts.is_cheap(size), lambda: self._whole(text))

    def _render(self, chat: Chat, seconds: float) -> str:
        template = self._templates.chosen(chat.variables)
        if not chat.has_media:
            return template.render(
                chat.messages,
                chat.variables,
                has_reasoning_effort=chat.has_reasoning_effort,
                budget_seconds=seconds,
            )
        return template.render_until_media(
            chat.messages,
            chat.variables,
            added_tokens=self._added,
            has_reasoning_effort=chat.has_reasoning_effort,
        )


def _before_media(encoded: Encoded, around: Frame) -> Tokens:
    """Returns the ids that stay the same whatever the engine inserts for media."""
    if not encoded.lasting:
        raise RequestError("unsupported_media")
    return framed_ids(encoded.ids[: encoded.lasting], Frame(around.before))
