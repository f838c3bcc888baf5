"""Turns prompts into token ids, with a model's own tokenizer and chat template."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from kvtools.simulator.hashing import PlacedItem

# An image has this many tokens, or two, three or four times as many.
_IMAGE_STEP, _IMAGE_SIZES = 256, 4

Message = Mapping[str, Any]


class PromptError(ValueError):
    """The client's prompt cannot be turned into tokens."""


class ModelTokens:
    """The tokenizer and chat template in a model's directory.

    It reads `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja`, or the given
    template instead.

    Raises:
        ValueError: the tokenizer cannot be read.
    """

    def __init__(self, directory: Path, template: Path | None = None) -> None:
        self._tokenizer = _load(directory / "tokenizer.json")
        config = json.loads((directory / "tokenizer_config.json").read_bytes())
        self._special_texts = {
            key: value for key, value in config.items() if key.endswith("_token") and value
        }
        # The environment that model publishers write their templates for.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _raise_exception
        environment.filters["tojson"] = _to_json
        described = directory / "config.json"
        settings = json.loads(described.read_bytes()) if described.is_file() else {}
        self._image_token: int | None = settings.get("image_token_id")
        source = (template or directory / "chat_template.jinja").read_text()
        self._template = environment.from_string(source)
        self._knows_developers = "developer" in source

    @property
    def size(self) -> int:
        """The number of token ids; all are below it."""
        return self._tokenizer.get_vocab_size()

    @property
    def end_of_turn(self) -> int:
        """The id that ends an answer.

        Raises:
            ValueError: the tokenizer names none.
        """
        token = self._tokenizer.token_to_id(self._special_texts.get("eos_token", ""))
        if token is None:
            raise ValueError("the tokenizer names no end-of-turn token")
        return token

    def of_text(self, text: str) -> list[int]:
        """Returns the ids of a completion prompt."""
        return self._tokenizer.encode(text).ids

    def of_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Returns the ids of each text separately, without special tokens around it."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def of_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Returns the ids of a conversation; the template itself writes all special tokens.

        Raises:
            PromptError: the template refuses the messages.
        """
        turns = [self._content(message) for message in messages]
        if not self._knows_developers and any(map(_is_developer, turns)):
            turns = _with_one_system_turn(turns)
        arguments = {
            **self._special_texts,
            **(template_arguments or {}),
            "messages": turns,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._template.render(arguments)
        # A template can fail on any form of message; whatever it raises, the message is at fault.
        except (TemplateError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise PromptError(f"the chat template refuses these messages: {error}") from error
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def with_images(
        self, messages: Sequence[Message], ids: Sequence[int]
    ) -> tuple[list[int], tuple[PlacedItem, ...]]:
        """Returns the ids of a conversation with those of its images, and where these are.

        An image is known by the hash of its URL, which also says how many tokens it has.
        """
        urls = [url for message in messages for url in _images(message.get("content"))]
        whole: list[int] = []
        items: list[PlacedItem] = []
        for token in ids:
            if token != self._image_token or not urls:
                whole.append(token)
                continue
            digest = hashlib.sha256(urls[len(items)].encode()).hexdigest()
            count = _IMAGE_STEP * (1 + int(digest[:8], 16) % _IMAGE_SIZES)
            items.append(PlacedItem(digest, len(whole), count))
            whole += [token] * count
        return whole, tuple(items)

    def _content(self, message: Message) -> Message:
        """Returns a message as the template takes it: in parts if the model sees images."""
        content = message.get("content")
        if self._image_token is None or not isinstance(content, list):
            return _with_plain_content(message)
        return {**message, "content": [_seen_part(part) for part in content]}

    def text_of(self, tokens: Sequence[int]) -> str:
        """Returns the text of an answer, without special tokens."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


def _load(path: Path) -> Tokenizer:
    content = path.read_text()
    try:
        return Tokenizer.from_str(content)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer: {error}") from error


def _with_plain_content(message: Message) -> Message:
    """Joins text parts with line breaks, as vLLM does for templates of this kind."""
    content = message.get("content")
    if not isinstance(message.get("role"), str):
        raise PromptError("every message needs a role")
    if content is None:
        return {**message, "content": ""}
    if isinstance(content, str):
        return message
    if not isinstance(content, list):
        raise PromptError("a message's content must be text or a list of parts")
    return {**message, "content": "\n".join(map(_text_part, content))}


def _with_one_system_turn(turns: Sequence[Message]) -> list[Message]:
    """Returns the turns with those of system and developers as one, first of all.

    So does vLLM for templates that know no developers (renderers/hf.py).
    """
    roles = ("system", "developer")
    texts = [str(turn["content"]) for turn in turns if turn.get("role") in roles]
    first = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    return [first, *(turn for turn in turns if turn.get("role") not in roles)]


def _is_developer(turn: Message) -> bool:
    return bool(turn.get("role") == "developer")


def _text_part(part: object) -> str:
    match part:
        case {"type": "text" | "input_text" | "output_text", "text": str(text)}:
            return text
        case _:
            raise PromptError("this model takes text parts only")


def _seen_part(part: object) -> Message:
    match part:
        case {"type": "image_url"}:
            return {"type": "image"}
    return {"type": "text", "text": _text_part(part)}


def _images(content: object) -> Iterator[str]:
    """Yields the URLs of a content's images."""
    for part in content if isinstance(content, list) else ():
        match part:
            case {"type": "image_url", "image_url": {"url": str(url)}}:
                yield url


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
