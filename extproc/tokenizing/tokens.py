"""Turns prompts into token ids: exactly the engine's, or an error."""

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from extproc.base.errors import RequestError, StartError
from extproc.base.tokenizer_files import MAX_TEMPLATE_BYTES, TokenizerFiles, read_file
from extproc.config.schema import Model
from extproc.renderers.renderer import Renderer
from extproc.requests.prompt import (
    CONVERTED,
    CUT,
    EMPTY_TOOLS,
    FRAME,
    IN_CODE,
    USUAL_VARIABLES,
    Chat,
    Prompt,
    Text,
    TokenIds,
)
from extproc.templates.bounds import Tick
from extproc.templates.chat_template import BUDGET_SECONDS, ChatTemplate
from extproc.templates.rust_template import SPECIAL_NAMES, RustTemplate, of_file
from extproc.templates.skeletons import Skeletons
from extproc.tokenizing import rust_cut
from extproc.tokenizing.added_tokens import LoadedTokens, TokenFiles, are_alike, loaded_in_all_ways
from extproc.tokenizing.adding import added_in, model_ids, with_added
from extproc.tokenizing.cpu_limit import run_within
from extproc.tokenizing.encoder_choice import (
    NO_FRAME,
    RANDOM,
    EncoderChoice,
    choose,
    framed_ids,
)
from extproc.tokenizing.families import CodeRendering, ModelFiles, Prepare, family_of
from extproc.tokenizing.plain_turns import plain_turns
from extproc.tokenizing.sglang_multimodal import is_multimodal
from extproc.tokenizing.text_encoder import MAX_KNOWN_BYTES, EncodedText, TextEncoder
from extproc.tokenizing.token_files import SettingsFiles, object_in
from extproc.tokenizing.tokenizer_classes import classes_of, may_be_cut_otherwise
from extproc.tokenizing.tokenizer_config import may_be_framed_otherwise, text_of
from extproc.tokenizing.tokenizer_layout import Frame, Layout
from extproc.tokenizing.vocabulary import Vocabulary, read_vocabulary
from kvstate.overlap import Tokens

log = logging.getLogger("kvsteer.tokens")

# CPU time for a model's tokenizer.json and some texts of every kind; large ones take two seconds.
MAX_LOAD_SECONDS = 20.0


class ChatTemplates:
    """A model's chat templates by name.

    named: "default" and "tool_use" are engines' names; "processor" is KVSteer's name for the
        template of a multimodal model's processor, if it differs.
    compile_for_rust: returns the one that vLLM's Rust front end uses, None if there is none.
    """

    def __init__(
        self,
        named: Mapping[str, ChatTemplate],
        compile_for_rust: Callable[[], RustTemplate | None] = lambda: None,
    ) -> None:
        self._named = named
        self._compile_for_rust = compile_for_rust

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

    @cached_property
    def _of_rust(self) -> RustTemplate | None:
        return self._compile_for_rust()

    @property
    def of_rust(self) -> RustTemplate:
        """The template that vLLM's Rust front end uses.

        Raises:
            RequestError: there is none.
        """
        if self._of_rust is None:
            raise RequestError("no_chat_template")
        return self._of_rust

    @property
    def lacking(self) -> list[str]:
        """What they name and a rendering here refuses, in words."""
        return sorted({one for template in self._named.values() for one in template.lacking})

    def reads(self, name: str) -> bool:
        """Returns whether any of them may read a variable."""
        return any(template.names(name) for template in self._named.values())

    @property
    def skeletons(self) -> Skeletons | None:
        """Those of the template of plain conversations, None if there are none."""
        with suppress(RequestError):
            return self.chosen(USUAL_VARIABLES).skeletons
        return None


def load(
    directory: Path,
    named: Mapping[str, str | list[str]],
    override: Path | None = None,
    keywords: Mapping[str, Any] = MappingProxyType({}),
) -> ChatTemplates:
    """Loads the chat templates in a model's directory.

    named: special tokens by the names that templates use. override: a template that the operator
        also gave to the engine. keywords: the engine's own arguments for templates.

    Raises:
        OSError, ValueError: a file cannot be read, or has no template.
    """
    own = [
        *([_Source("default", _template(override), override)] if override else _sources(directory))
    ]
    model_type = object_in(directory / "config.json").get("model_type")
    kind = model_type if isinstance(model_type, str) else ""

    def compiled(source: str) -> ChatTemplate:
        return ChatTemplate(source, named, model_type=kind, keywords=keywords)

    def compiled_for_rust() -> RustTemplate | None:
        source = own[0] if override else _source_of_rust(directory)
        if source is None:
            return None
        is_bare = source.file.suffix == ".json"
        text = source.text if is_bare else of_file(source.text)
        with suppress(ValueError):  # the front end does not start with it
            return RustTemplate(text, _special_tokens_of_rust(directory))
        return None

    return ChatTemplates(_compiled(own, compiled), compiled_for_rust)


def _special_tokens_of_rust(directory: Path) -> dict[str, str]:
    settings = object_in(directory / "tokenizer_config.json")
    found = {name: text_of(settings.get(name)) for name in SPECIAL_NAMES}
    return {name: text for name, text in found.items() if text is not None}


class _Source(NamedTuple):
    """The text of a template, and the file that it is from."""

    name: str
    text: str
    file: Path


def _source_of_rust(directory: Path) -> _Source | None:
    """Returns the template of a directory that vLLM's Rust front end uses, None if it has none.

    Source: vLLM 0.33.0, rust/src/text/src/backend/hf/model_files.rs and chat/src/renderer/hf.
    """
    of_processor, alone = directory / "chat_template.json", directory / "chat_template.jinja"
    found = object_in(of_processor).get("chat_template")
    if isinstance(found, str) and found.strip():
        return _Source("default", found, of_processor)
    if not of_processor.is_file() and alone.is_file():
        text = _template(alone)
        if text.strip():
            return _Source("default", text, alone)
    settings = directory / "tokenizer_config.json"
    named = object_in(settings).get("chat_template")
    return _Source("default", named, settings) if isinstance(named, str) else None


def _compiled(
    sources: Iterable[_Source], compile_one: Callable[[str], ChatTemplate]
) -> dict[str, ChatTemplate]:
    """Returns the templates by name; of two with one name, the last."""
    left, compiled, named = MAX_TEMPLATE_BYTES, dict[str, ChatTemplate](), dict[str, ChatTemplate]()
    for name, text, file in sources:
        left -= len(text)
        if left < 0:
            raise ValueError(f"{file}: chat templates of more than {MAX_TEMPLATE_BYTES} characters")
        try:
            if text not in compiled:
                compiled[text] = compile_one(text)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        named[name] = compiled[text]
    return named


def _sources(directory: Path) -> Iterator[_Source]:
    files = _files(directory)
    if files:
        yield from (_Source(name, _template(file), file) for name, file in files)
        return
    settings, of_processor = directory / "tokenizer_config.json", directory / "chat_template.json"
    for name, text in _settings_templates(object_in(settings).get("chat_template")).items():
        yield _Source(name, text, settings)
    processor = object_in(of_processor).get("chat_template")
    if isinstance(processor, str):
        yield _Source("processor", processor, of_processor)


def _files(directory: Path) -> list[tuple[str, Path]]:
    """Returns the templates in separate files; if there are any, those in settings are unused."""
    more = sorted((directory / "additional_chat_templates").glob("*.jinja"))
    # a pipe would be read for ever
    found = [(path.stem, path) for path in more if path.is_file()]
    default = directory / "chat_template.jinja"
    return [*found, ("default", default)] if default.is_file() else found


def _template(path: Path) -> str:
    return read_file(path, MAX_TEMPLATE_BYTES).decode()


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


def lacking_in_words(lacking: Sequence[str]) -> str:
    """Returns what it means that templates name what a rendering refuses."""
    return (
        f"its chat template names {', '.join(lacking)}, of which only the engine knows the result:"
        " a conversation for which it is used is not keyed (unsupported_template)"
    )


class StartedPrompt(msgspec.Struct, frozen=True, gc=False):
    """A prompt that is rendered and looked up, but not tokenized.

    new_characters: how many characters of its text are new.
    is_cheap: whether they are tokenized without a thread (see `Encoder.inline_characters`).
    drops_media: whether the engine leaves the prompt's media out.
    forms: those that the chat's dialect decided (`extproc.requests.prompt`). added: for each media
    item, the ids of the added tokens that the template writes for it; empty for only the ids before
    the first one.
    finish: returns the token ids, which must not be changed, or raises RequestError; any thread may
        call it.
    """

    new_characters: int
    is_cheap: bool
    finish: Callable[[], Tokens]
    forms: int = 0
    added: tuple[Tokens, ...] = ()
    drops_media: bool = False


class Tokenizer:
    """The tokenizer and chat templates of one model; safe to use from several threads.

    plain_turns: of plain conversations; None if it takes more to know their ids. added_tokens: the
    texts of its added tokens, by their ids.
    in_code: how its conversations are rendered if no template does that. prepare: what changes them
    before a template, None if nothing does. frame_forms: those of
    texts to which the engine adds special tokens. config: of config.json. keywords: the engine's
    own arguments for templates.
    """

    def __init__(
        self,
        choice: EncoderChoice,
        templates: ChatTemplates,
        vocabulary: Vocabulary,
        in_code: CodeRendering | None = None,
        frame_forms: int = 0,
        config: Mapping[str, Any] = MappingProxyType({}),
        keywords: Mapping[str, Any] = MappingProxyType({}),
        prepare: Prepare | None = None,
    ) -> None:
        self._config, self._keywords = config, keywords
        self._forms = vocabulary.forms
        self._frame_forms = frame_forms
        self._in_code, self._prepare = in_code, prepare
        self._library = vocabulary.library
        self._texts = choice.texts
        self._frame = choice.frame
        self._encode_whole = choice.encode_whole
        self._layout = choice.layout
        by_id = sorted(choice.layout.added_tokens, key=lambda token: token.id)
        self.added_tokens = tuple(token.content for token in by_id)
        self._added = frozenset(self.added_tokens)
        self._added_ids = frozenset(map(self._library.token_to_id, self._added))
        self._added_in_texts: dict[str, Tokens] = {}
        self._templates = templates
        is_template_alone = in_code is None and prepare is None
        skeletons = templates.skeletons if is_template_alone else None
        self.plain_turns = plain_turns(choice.texts, skeletons, self._forms)

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
            said = SettingsFiles.read(files.directory)
            keywords = model.chat_template_kwargs or {}
            settings, config = said.settings, said.config
            file = files.chosen(model.tokenizer_mode)
            vocabulary, choice, ways = _chosen(file, model.name, said)
            named = ways[0].named
            needed = _model_files(model, files.directory, config, vocabulary, choice, named)
            family = family_of(config, file.name)
            code = None if family.render is None else family.render(needed)
            prepare = None if family.prepare is None else family.prepare(needed)
            # a template has no effect if the engine builds prompts in code
            templates = (
                ChatTemplates({}) if code else load(files.directory, named, override, keywords)
            )
            if templates.lacking:
                log.warning("model %s: %s", model.name, lacking_in_words(templates.lacking))
            if not vocabulary.forms and _may_differ(said, choice.layout, ways, templates):
                vocabulary = vocabulary._replace(forms=vocabulary.forms | CUT)
            id_of = vocabulary.library.token_to_id
            may_vary = may_be_framed_otherwise(settings, choice.frame, id_of)
            frame_forms = FRAME if may_vary else 0
            return cls(choice, templates, vocabulary, code, frame_forms, config, keywords, prepare)
        except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
            raise StartError(f"model {model.name}: {model.tokenizer}: {error}") from None

    @property
    def text_forms(self) -> int:
        """The forms of all its texts, 0 if they are in no doubt."""
        return self._forms

    @property
    def renders_in_code(self) -> bool:
        """Whether engines build the model's conversations in code, not by a template."""
        return self._in_code is not None

    @property
    def start_forms(self) -> int:
        """The form of today's conversations where a Rust front end writes the date of its start."""
        return 0 if self._in_code is None else self._in_code.start_forms()

    @property
    def is_shown_by_tokenize(self) -> bool:
        """Whether the engine's POST /tokenize renders conversations as its other APIs do."""
        return self._in_code is None or self._in_code.renderer.is_shown_by_tokenize

    def encode(self, prompt: Prompt) -> Tokens:
        """Returns the token ids of a prompt, which must not be changed; for a chat with media, as
        its template writes it, or only those before it.

        Raises:
            RequestError: the chat template refuses it, the model has none, or its text cannot be
                tokenized with certainty.
        """
        return self.start(prompt).finish()

    def text_of(self, tokens: Sequence[int]) -> str:
        """Returns the text of token ids, including special tokens; invalid ids are left out.

        A user's text must not be shown anywhere.
        """
        return self._library.decode(list(tokens), skip_special_tokens=False)

    def start(self, prompt: Prompt, render_seconds: float = BUDGET_SECONDS) -> StartedPrompt:
        """Renders a prompt, looks it up, and returns the rest of the work.

        render_seconds: how long the template may take.

        Raises:
            RequestError: as `encode`.
        """
        if isinstance(prompt, array | TokenIds):
            ids = prompt.ids if isinstance(prompt, TokenIds) else prompt
            return StartedPrompt(0, is_cheap=True, finish=lambda: ids)
        if isinstance(prompt, Chat) and self._in_code is not None and self._in_code.texts:
            chat = self._with_defaults(prompt)
            return _start_segments(
                chat, self._in_code.renderer, self._in_code.texts, render_seconds
            )
        framed, sent = self._forms, prompt
        if isinstance(prompt, Chat) and prompt.conversion and self._is_framed_by_sglang(prompt):
            sent = msgspec.structs.replace(prompt, add_special_tokens=True)
            framed |= CONVERTED
        framed |= self._forms_of_frame(sent)
        text, forms, added = self._write(sent, render_seconds)
        forms |= framed
        if isinstance(sent, Chat) and sent.conversion and sent.conversion.continued:
            return self._start_continued(text, sent, forms)
        if sent.add_special_tokens and self._frame is None:
            return self._start_whole(text, forms, has_media=_has_media(sent))
        around = (self._frame or NO_FRAME) if sent.add_special_tokens else NO_FRAME
        work = self._texts.begin(text)
        is_cut = _has_media(sent) and not added

        def finish() -> Tokens:
            encoded = self._texts.finish(work)
            return _before_media(encoded, around) if is_cut else framed_ids(encoded.ids, around)

        is_cheap = self._texts.is_cheap(work.new_characters)
        return StartedPrompt(work.new_characters, is_cheap, finish, forms, added)

    def _start_continued(self, text: str, chat: Chat, forms: int) -> StartedPrompt:
        """Starts a text with another one behind it that SGLang tokenizes apart.

        It does not with a model that is multimodal, or may be. So this is certain only where both
        ways are the same, and where the special tokens that it adds to the second text are those
        it takes away.
        """
        assert chat.conversion is not None
        continued = chat.conversion.continued
        around = (self._frame or NO_FRAME) if chat.add_special_tokens else NO_FRAME
        work = self._texts.begin(text + continued)

        def finish() -> Tokens:
            whole = self._texts.finish(work).ids
            first = self._texts.finish(self._texts.begin(text)).ids
            apart = self._library.encode(continued, add_special_tokens=False).ids
            if not _takes_away(self._frame, whole) or whole.tolist() != [*first, *apart]:
                raise RequestError("unsupported_continuation")
            return framed_ids(whole, around)

        return StartedPrompt(work.new_characters, is_cheap=False, finish=finish, forms=forms)

    def _forms_of_frame(self, prompt: Chat | Text) -> int:
        """Returns FRAME if the special tokens of a prompt depend on the engine's release.

        Raises:
            RequestError: they do, and nothing tells it.
        """
        if not prompt.special_tokens_vary or self._frame == NO_FRAME:
            return self._frame_forms if prompt.add_special_tokens else 0
        if isinstance(prompt, Text) or prompt.dialect is None:
            raise RequestError("unsupported_special_tokens")
        return FRAME

    def _is_framed_by_sglang(self, chat: Chat) -> bool:
        """Returns whether SGLang adds special tokens to a conversation without media."""
        rules = None if chat.dialect is None else chat.dialect.sglang
        if rules is None or chat.has_media or self._frame == NO_FRAME:
            return False
        return is_multimodal(self._config, enabled=rules.enable_multimodal)

    def _start_whole(self, text: str, forms: int, *, has_media: bool) -> StartedPrompt:
        if has_media:
            raise RequestError("unsupported_special_tokens")
        size = self._texts.begin(text).new_characters
        return StartedPrompt(
            size, self._texts.is_cheap(size), lambda: self._encode_whole(text), forms
        )

    def _write(self, prompt: Chat | Text, seconds: float) -> tuple[str, int, tuple[Tokens, ...]]:
        """Returns the text of a prompt, its forms, and what is written for each media item."""
        if isinstance(prompt, Text):
            return prompt.text, 0, ()
        forms = 0
        if self._prepare is not None and not (prompt.dialect and prompt.dialect.is_rust):
            prompt, forms = self._prepare(prompt)
        if prompt.has_media:
            text, decided, added = self._render_media(prompt)
            return text, forms | decided, added
        text, decided = self._render(prompt, seconds)
        return text, forms | decided, ()

    def _render(self, chat: Chat, seconds: float) -> tuple[str, int]:
        """Returns the text of a chat, and the forms that its dialect decided."""
        if self._in_code is not None:
            return _rendered_in_code(self._with_defaults(chat), self._in_code.renderer, seconds)
        if chat.dialect is not None and chat.dialect.is_rust:
            if self._prepare is not None:
                raise RequestError("unsupported_by_engine")
            text, forms = self._templates.of_rust.render(self._with_defaults(chat), Tick(seconds))
            return text, forms | CUT if rust_cut.may_be_cut_otherwise(self._layout, text) else forms
        template = self._templates.chosen(chat.variables).of(chat)
        if chat.variables.get("tools") != []:
            return template.render(chat, budget_seconds=seconds)
        text, forms = template.render(chat, budget_seconds=seconds / 2)
        is_same = self._is_same_without_tools(chat, text, seconds / 2)
        return text, forms if is_same else forms | EMPTY_TOOLS

    def _with_defaults(self, chat: Chat) -> Chat:
        """Returns a conversation with the engine's own arguments, for what renders in code."""
        if not (self._keywords and chat.takes_defaults):
            return chat
        return msgspec.structs.replace(chat, variables={**self._keywords, **chat.variables})

    def _is_same_without_tools(self, chat: Chat, text: str, seconds: float) -> bool:
        """Returns whether it makes no difference to a text that its list of tools is empty."""
        variables = {name: value for name, value in chat.variables.items() if name != "tools"}
        other = msgspec.structs.replace(chat, variables=variables)
        try:
            template = self._templates.chosen(variables).of(chat)
            return template.render(other, budget_seconds=seconds)[0] == text
        except RequestError:
            return False

    def _render_media(self, chat: Chat) -> tuple[str, int, tuple[Tokens, ...]]:
        """Returns the text of a chat with media, its forms, and what is written for each item.

        The text ends before the first item, and nothing is written, if no added token stands for
        an item of a kind.
        """
        if self._in_code is not None:
            raise RequestError("unsupported_media")
        if chat.variables.get("tools") == []:
            raise RequestError("unsupported_tools")
        template = self._templates.chosen(chat.variables).of(chat)
        text, forms = template.render_with_media(chat)
        is_sglang = chat.conversion is not None
        if is_sglang and self._frame != NO_FRAME and not template.names_first_token:
            raise RequestError("unsupported_special_tokens")  # SGLang encodes the text with them
        added = [self._added_in(template.text_for_media(kind)) for kind, _ in chat.media]
        if added and all(added):
            return text, forms, tuple(added)
        return *template.render_until_media(chat, added_tokens=self._added), ()

    def _added_in(self, text: str) -> Tokens:
        """Returns the ids of the added tokens in a text, in order."""
        if text not in self._added_in_texts:
            found = self._library.encode(text, add_special_tokens=False).ids if text else []
            ids = [token for token in found if token in self._added_ids]
            self._added_in_texts[text] = array("I", ids)
        return self._added_in_texts[text]


def _takes_away(frame: Frame | None, ids: Tokens) -> bool:
    """Returns whether a tokenizer adds nothing but the token with which a prompt begins."""
    return frame is not None and not frame.after and tuple(ids[: len(frame.before)]) == frame.before


def _model_files(
    model: Model,
    directory: Path,
    config: Mapping[str, Any],
    vocabulary: Vocabulary,
    choice: EncoderChoice,
    named: Mapping[str, str | list[str]],
) -> ModelFiles:
    override = Path(model.chat_template) if model.chat_template is not None else None

    def keeps_later_systems() -> bool:
        try:
            templates = load(directory, named, override)
            chosen = [templates.chosen({}), templates.chosen({"tools": []})]
        except (OSError, ValueError, RequestError):
            return False
        return all(template.keeps_later_systems for template in chosen)

    keeps = cache(keeps_later_systems)
    return ModelFiles(
        model.name, directory, config, vocabulary, choice.encoder, keeps, MAX_KNOWN_BYTES
    )


def _rendered_in_code(chat: Chat, renderer: Renderer, seconds: float) -> tuple[str, int]:
    """Returns what a renderer makes of a chat, which needs a proof like a form of its own."""
    if chat.has_media and not renderer.drops_media:
        raise RequestError("unsupported_media")
    if chat.conversion is not None:
        raise RequestError("unsupported_by_engine")  # SGLang's code is not vLLM's
    if chat.variables.get("tools") == []:
        raise RequestError("unsupported_tools")
    text, forms = renderer.render(chat, budget_seconds=seconds)
    return text, forms | IN_CODE


def _start_segments(
    chat: Chat, renderer: Renderer, texts: TextEncoder, render_seconds: float
) -> StartedPrompt:
    """Renders a chat to joined segments; engines add no special tokens to these."""
    joined, forms = _rendered_in_code(chat, renderer, render_seconds)
    work = texts.begin(joined)
    is_cheap = texts.is_cheap(work.new_characters)
    return StartedPrompt(
        work.new_characters,
        is_cheap,
        lambda: texts.finish(work).ids,
        forms,
        drops_media=renderer.drops_media,
    )


def _chosen(
    file: Path, model: str, said: SettingsFiles
) -> tuple[Vocabulary, EncoderChoice, list[LoadedTokens]]:
    """Returns the vocabulary of a file, how it is used, and the ways in which releases load it.

    Raises:
        OSError: it cannot be read. ValueError: it is none, or tokenizing takes too long.
    """
    build = read_vocabulary(file, said.settings)

    def load_and_choose() -> tuple[Vocabulary, EncoderChoice, list[LoadedTokens]]:
        vocabulary, ways = _as_loaded(build(), said)
        # leftovers of training in the file; engines switch both off
        vocabulary.library.no_truncation()
        vocabulary.library.no_padding()
        library, refused = vocabulary.library, vocabulary.refused
        return vocabulary, choose(library, model, MAX_KNOWN_BYTES, refused=refused), ways

    try:
        return run_within(MAX_LOAD_SECONDS, load_and_choose)
    except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
        raise ValueError(f"{file}: {error}") from None


def _as_loaded(
    vocabulary: Vocabulary, said: SettingsFiles
) -> tuple[Vocabulary, list[LoadedTokens]]:
    """Returns a vocabulary with the added tokens of all files, and the ways to read these."""
    library = vocabulary.library
    if vocabulary.version:  # Mistral's library knows no settings
        return vocabulary, [LoadedTokens({}, {})]
    settings, config, special_map, listed = said
    files = TokenFiles(settings, special_map, listed, list(added_in(library).values()))
    ways = loaded_in_all_ways(files, model_ids(library), *classes_of(settings, config))
    library = with_added(library, ways[0].added)
    if settings.get("split_special_tokens") is True:
        library.encode_special_tokens = True
    is_random = bool(getattr(library.model, "dropout", None))
    refused = RANDOM if is_random else vocabulary.refused
    return vocabulary._replace(library=library, refused=refused), ways


def _may_differ(
    said: SettingsFiles, layout: Layout, ways: list[LoadedTokens], templates: ChatTemplates
) -> bool:
    """Returns whether some releases make other tokens of texts than others."""
    if may_be_cut_otherwise(said.settings, said.config, layout):
        return True
    splits_special = bool(said.settings.get("split_special_tokens"))
    return not are_alike(ways, splits_special=splits_special, reads=templates.reads)


def _has_media(prompt: Chat | Text) -> bool:
    return isinstance(prompt, Chat) and prompt.has_media


def _before_media(encoded: EncodedText, around: Frame) -> Tokens:
    """Returns the ids that stay the same whatever the engine inserts for media."""
    if not encoded.lasting:
        raise RequestError("unsupported_media")
    return framed_ids(encoded.ids[: encoded.lasting], Frame(around.before))
