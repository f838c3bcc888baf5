"""From prompts to token ids: exactly the engine's, or an error and no claim."""

import logging
from array import array
from collections.abc import Callable
from pathlib import Path

import msgspec
import tokenizers

from extproc.config.schema import Model
from extproc.errors import RequestError, StartError
from extproc.requests.prompt import Chat, Prompt, Text
from extproc.templates import template_files
from extproc.templates.chat_template import BUDGET_SECONDS
from extproc.templates.template_files import ChatTemplates
from extproc.tokenizer_files import TokenizerFiles
from extproc.tokenizing.encoder_choice import NO_FRAME, Choice, choose, framed_ids
from extproc.tokenizing.text_encoder import Encoded
from extproc.tokenizing.tokenizer_layout import Frame
from kvstate.events import Tokens

log = logging.getLogger("kvsteer.tokens")

# What a model's texts and their ids may take: a thousand conversations of 32k tokens each.
MAX_KNOWN_BYTES = 256 * 1024 * 1024


class Started(msgspec.Struct, frozen=True, gc=False):
    """A prompt that is rendered and looked up, but not tokenized.

    new_characters: how much of its text is not known.
    is_cheap: tokenizing that takes under a millisecond, so that no thread is needed.
    finish: gives the token ids, not to be changed, or raises RequestError; may run in any thread.
    """

    new_characters: int
    is_cheap: bool
    finish: Callable[[], Tokens]


class Tokenizer:
    """The tokenizer and chat templates of one model; safe to use from several threads."""

    def __init__(self, choice: Choice, templates: ChatTemplates) -> None:
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
            # left in the file by training; engines switch both off
            tokenizer.no_truncation()
            tokenizer.no_padding()
            choice = choose(tokenizer, model.name, MAX_KNOWN_BYTES)
            return cls(choice, template_files.load(files.directory, override))
        except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
            raise StartError(f"model {model.name}: {model.tokenizer}: {error}") from None

    def encode(self, prompt: Prompt) -> Tokens:
        """Returns the token ids of a prompt, which must not be changed; of a chat with media, those
        before it.

        Raises:
            RequestError: the chat template refuses it, or the model has none; or what follows of
                its text is not certain.
        """
        return self.start(prompt).finish()

    def start(self, prompt: Prompt, render_seconds: float = BUDGET_SECONDS) -> Started:
        """Renders a prompt and looks it up.

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
        if not chat.has_media:
            return self._templates.render(
                chat.messages,
                chat.variables,
                has_reasoning_effort=chat.has_reasoning_effort,
                budget_seconds=seconds,
            )
        return self._templates.render_until_media(
            chat.messages,
            chat.variables,
            added_tokens=self._added,
            has_reasoning_effort=chat.has_reasoning_effort,
        )


def _before_media(encoded: Encoded, around: Frame) -> Tokens:
    """The ids that stay, whatever the engine puts in the place of media."""
    if not encoded.lasting:
        raise RequestError("unsupported_media")
    return framed_ids(encoded.ids[: encoded.lasting], Frame(around.before))
