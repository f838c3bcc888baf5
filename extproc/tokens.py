"""From prompts to token ids: exactly the engine's, or an error and no claim."""

import json
import logging
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from extproc.chat_template import ChatTemplate
from extproc.config import Model, RemoteTokenizer
from extproc.errors import RequestError, StartError
from extproc.request import Chat, Prompt, Text
from extproc.tokenizer_files import TokenizerFiles
from kvstate.events import Tokens

log = logging.getLogger("kvsteer.tokens")

_SPECIAL_TOKENS = tuple(
    f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


class Tokenizer:
    """The tokenizer and chat template of one model; safe to use from several threads."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        self._template = template

    @classmethod
    def load(cls, model: Model) -> "Tokenizer | None":
        """The tokenizer that a model's configuration names, None if it names none.

        Raises:
            StartError: its files cannot be read.
        """
        if isinstance(model.tokenizer, RemoteTokenizer):
            log.warning(
                "model %s: remote tokenizers are not asked yet; it is routed by load", model.name
            )
            return None
        if model.tokenizer is None:
            return None
        try:
            files = TokenizerFiles.find(model.tokenizer)
            tokenizer = tokenizers.Tokenizer.from_file(str(files.tokenizer))
            # left in the file by training; engines switch both off
            tokenizer.no_truncation()
            tokenizer.no_padding()
            return cls(tokenizer, _load_template(files, model.chat_template))
        except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
            raise StartError(f"model {model.name}: {model.tokenizer}: {error}") from None

    def encode(self, prompt: Prompt) -> Tokens:
        """The token ids of a prompt.

        Raises:
            RequestError: the chat template refuses it, or the model has none.
        """
        if isinstance(prompt, array):
            return prompt
        if isinstance(prompt, Text):
            return self._ids(prompt.text, add_special_tokens=prompt.add_special_tokens)
        return self._ids(self._render(prompt), add_special_tokens=prompt.add_special_tokens)

    def _render(self, chat: Chat) -> str:
        if self._template is None:
            raise RequestError("no_chat_template")
        return self._template.render(
            chat.messages, chat.variables, has_reasoning_effort=chat.has_reasoning_effort
        )

    def _ids(self, text: str, *, add_special_tokens: bool) -> Tokens:
        try:
            encoding = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except (UnicodeEncodeError, TypeError):
            raise RequestError("not_unicode") from None  # a lone surrogate from a JSON escape
        return array("I", encoding.ids)


def _load_template(files: TokenizerFiles, override: str | None) -> ChatTemplate | None:
    settings: Mapping[str, Any] = {}
    if files.config is not None:
        settings = json.loads(files.config.read_bytes())
    if override is not None:
        source = Path(override).read_text()
    elif files.template is not None:
        source = files.template.read_text()
    else:
        source = _default_template(settings.get("chat_template"))
    if not source:
        return None
    named = {name: _content(settings.get(name)) for name in _SPECIAL_TOKENS}
    return ChatTemplate(source, {name: token for name, token in named.items() if token})


def _default_template(entry: object) -> str:
    """The template in tokenizer_config.json: one text, or a list with a name each."""
    if isinstance(entry, list):
        named = {item["name"]: item["template"] for item in entry}
        return str(named.get("default", ""))
    return entry if isinstance(entry, str) else ""


def _content(token: object) -> str | None:
    """A special token's text, given as text or as an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None
