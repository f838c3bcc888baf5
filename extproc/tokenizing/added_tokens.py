"""The added tokens of a tokenizer as engines load it, from all files of a model's directory.

tokenizer.json is not all: transformers also reads `added_tokens_decoder`, named special tokens and
lists of them in tokenizer_config.json; and only where that has no `added_tokens_decoder`,
special_tokens_map.json and added_tokens.json. What is read later wins, flags included; a new token
gets the id that the vocabulary has for it, or the next one after all others: the ids in the
settings only give the order.

Source: transformers 4.57.1, 5.19 and 5.20.2 (tokenization_utils_base.py, `_from_pretrained`;
tokenization_utils_fast.py and tokenization_utils_tokenizers.py, `__init__`; the classes), and the
library `tokenizers` 0.22 and 0.23, whose `add_tokens` `_Table` repeats. The ways differ:

- release 4 knows `additional_special_tokens`, and `extra_special_tokens` only as an object; it adds
  named tokens that have flags of their own again, over those that are there;
- release 5 takes `additional_special_tokens` only where there are no `extra_special_tokens`, and
  every other text whose name ends with `_token`;
- the classes of release 5 that are rebuilt (`extproc.tokenizing.tokenizer_classes`) do not take the
  tokens of tokenizer.json, unless there is no `added_tokens_decoder`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from typing import Any, NamedTuple

import msgspec

from extproc.tokenizing.tokenizer_layout import (
    MAX_ADDED_CHARACTERS,
    MAX_ADDED_TOKENS,
    AddedToken,
)

# Names of special tokens, in the order in which they are added.
KINDS = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_OLD_LIST, _NEW_LIST = "additional_special_tokens", "extra_special_tokens"
_DECODER = "added_tokens_decoder"
_ENDS = "<|endoftext|>"


class _TokenizerClass(NamedTuple):
    """The special tokens that a class has where settings name none, by release.

    wraps: those of release 4 that are tokens with flags, even if they are named as texts.
    again: whether release 5 adds all special tokens again; levels: and without their flags.
    """

    old: Mapping[str, str] = {}
    new: Mapping[str, str] = {}
    wraps: Sequence[str] = ()
    again: bool = False
    levels: bool = False


def _named(**kinds: str) -> Mapping[str, str]:
    return {f"{kind}_token": text for kind, text in kinds.items()}


_LLAMA = _named(unk="<unk>", bos="<s>", eos="</s>")
_GEMMA = _named(unk="<unk>", bos="<bos>", eos="<eos>", pad="<pad>")
_QWEN = _named(unk=_ENDS, eos=_ENDS, pad=_ENDS)
_GPT = _named(unk=_ENDS, bos=_ENDS, eos=_ENDS)
_COHERE = _named(unk="<UNK>", bos="<BOS_TOKEN>", eos="<|END_OF_TURN_TOKEN|>")
_COHERE_5 = {
    **_COHERE,
    **_named(pad="<PAD>", cls="<CLS>", sep="<SEP>", mask="<MASK_TOKEN>"),
}
_CLASSES: Mapping[str, _TokenizerClass] = {
    "CohereTokenizer": _TokenizerClass(_COHERE, _COHERE_5, again=True),
    "GPT2Tokenizer": _TokenizerClass(_GPT, _GPT),
    "GPTNeoXTokenizer": _TokenizerClass(_GPT, {**_GPT, **_named(pad="<|padding|>")}),
    "GemmaTokenizer": _TokenizerClass(_GEMMA, {**_GEMMA, **_named(mask="<mask>")}),
    "LlamaTokenizer": _TokenizerClass(_LLAMA, _LLAMA),
    "Qwen2Tokenizer": _TokenizerClass(
        _QWEN, _QWEN, wraps=("bos_token", *_QWEN), again=True, levels=True
    ),
    "Qwen3_5Tokenizer": _TokenizerClass({}, _QWEN),
}


class TokenFiles(NamedTuple):
    """What a model's files say about its tokens.

    settings: of tokenizer_config.json. special_map: of special_tokens_map.json, listed: of
    added_tokens.json; None where there is no such file. layout: of tokenizer.json, as the library
    reads it.
    """

    settings: Mapping[str, Any]
    special_map: Mapping[str, Any] | None
    listed: Mapping[str, Any] | None
    layout: Sequence[AddedToken]


class ModelIds(NamedTuple):
    """The vocabulary without added tokens. size: how many ids it has."""

    id_of: Callable[[str], int | None]
    size: int


class LoadedTokens(NamedTuple):
    """A tokenizer as one release loads it.

    added: its added tokens by their texts. named: special tokens by the names that templates use.
    is_clear: whether no text is listed twice, with other flags.
    """

    added: Mapping[str, AddedToken]
    named: Mapping[str, str | list[str]]
    is_clear: bool = True


class _LoadingWay(Enum):
    """A way to load a tokenizer: by release 4; by release 5 from the file, or rebuilt."""

    OLD = auto()
    KEPT = auto()
    REBUILT = auto()


class _RefusedError(ValueError):
    """A release would not load these files; the message says why."""


def loaded_in_all_ways(
    files: TokenFiles, model: ModelIds, named: str | None, registered: str | None
) -> list[LoadedTokens]:
    """Returns what releases make of a model's files, the way that newer ones most likely go first.

    named, registered: the tokenizer's classes (`extproc.tokenizing.tokenizer_classes`).

    Raises:
        ValueError: no release loads them, or they hold too much; says why.
    """
    ways = [
        (_LoadingWay.KEPT, _TokenizerClass()),
        (_LoadingWay.OLD, _class_of(named or registered)),
    ]
    for name in dict.fromkeys((named, registered)):
        if name in _CLASSES:
            is_usual = name == registered
            ways.insert(0 if is_usual else len(ways), (_LoadingWay.REBUILT, _class_of(name)))
    found, refusal = [], ""
    for way, kind in ways:
        try:
            found.append(_loaded(files, model, way, kind))
        except _RefusedError as error:
            refusal = refusal or str(error)
    if not found:
        raise ValueError(refusal)
    return found


def are_alike(
    loaded: Iterable[LoadedTokens], *, splits_special: bool, reads: Callable[[str], bool]
) -> bool:
    """Returns whether texts and templates are the same in all ways.

    splits_special: whether it matters which tokens are special. reads: whether templates read a
        name.
    """
    ways = list(loaded)
    first, *others = [_seen(one, splits_special=splits_special, reads=reads) for one in ways]
    return all(other == first for other in others) and all(one.is_clear for one in ways)


def _seen(one: LoadedTokens, *, splits_special: bool, reads: Callable[[str], bool]) -> object:
    """Returns what a text or a template can show of a tokenizer."""
    added = one.added.values()
    tokens = {
        token if splits_special else msgspec.structs.replace(token, special=False)
        for token in added
    }
    return tokens, {name: text for name, text in one.named.items() if text and reads(name)}


class _Token(NamedTuple):
    """A token as the settings give it. normalized: None for all but special tokens."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    special: bool = False

    def with_id(self, number: int) -> AddedToken:
        content, single_word, lstrip, rstrip, normalized, special = self
        is_normalized = not special if normalized is None else normalized
        return AddedToken(number, content, single_word, lstrip, rstrip, is_normalized, special)


# A special token that is only named has no flags of its own.
_Special = str | _Token


class _Table:
    """Added tokens by their texts, as `tokenizers` keeps them: the last flags of each count."""

    def __init__(self, model: ModelIds, tokens: Iterable[AddedToken]) -> None:
        self._model = model
        self.tokens = {token.content: token for token in tokens}
        self._last = max((token.id for token in self.tokens.values()), default=-1)

    def add(self, tokens: Iterable[_Token], *, is_old: bool) -> None:
        """Adds tokens; 0.22, with release 4, passes over those that were there at the beginning."""
        known = {*self.tokens.values()} if is_old else frozenset[AddedToken]()
        for token in tokens:
            if token.content and token.with_id(self._id_of(token.content)) not in known:
                number = self._id_of(token.content)
                self._last = max(self._last, number)
                self.tokens[token.content] = token.with_id(number)

    def _id_of(self, content: str) -> int:
        known = self.tokens.get(content)
        number = self._model.id_of(content) if known is None else known.id
        return max(self._last + 1, self._model.size) if number is None else number


def _class_of(name: str | None) -> _TokenizerClass:
    return _CLASSES.get(name or "", _TokenizerClass())


def _loaded(
    files: TokenFiles, model: ModelIds, way: _LoadingWay, kind: _TokenizerClass
) -> LoadedTokens:
    is_old = way is _LoadingWay.OLD
    settings = {**files.settings}
    if not is_old:
        _name_as_new(settings)
    numbered = _numbered(files, settings, is_old=is_old)
    for name, text in (kind.old if is_old else kind.new).items():
        settings.setdefault(name, text)
    for name in kind.wraps if is_old else ():
        if isinstance(settings.get(name), str):
            settings[name] = _Token(settings[name], special=True)
    special = _Specials.old(settings) if is_old else _Specials.new(settings)
    table = _Table(model, () if way is _LoadingWay.REBUILT else files.layout)
    table.add(_missing(table, numbered, special, is_old=is_old), is_old=is_old)
    if kind.again and way is _LoadingWay.REBUILT:
        table.add(special.again(levels=kind.levels), is_old=False)
    if len(table.tokens) > MAX_ADDED_TOKENS:
        raise ValueError(f"more than {MAX_ADDED_TOKENS} added tokens")
    is_clear = len({*map(_settled, numbered)}) == len({token.content for token in numbered})
    return LoadedTokens(table.tokens, special.variables, is_clear)


def _name_as_new(settings: dict[str, Any]) -> None:
    """Renames what release 5 knows by other names, before it reads other files."""
    if _OLD_LIST in settings and not settings.get(_NEW_LIST):
        settings[_NEW_LIST] = settings.pop(_OLD_LIST)
    own = [name for name in settings if _is_own(name, settings[name])]
    more = settings.pop(_NEW_LIST) if isinstance(settings.get(_NEW_LIST), Mapping) else {}
    found = {**{name: settings.pop(name) for name in own}, **more}
    if found or _MODELS_OWN not in settings:
        settings[_MODELS_OWN] = found


# Under this name, release 5 keeps special tokens of names that only a model has.
_MODELS_OWN = "model_specific_special_tokens"


def _is_own(name: str, value: object) -> bool:
    return name.endswith("_token") and name not in KINDS and isinstance(value, str)


def _numbered(files: TokenFiles, settings: dict[str, Any], *, is_old: bool) -> list[_Token]:
    """Returns the tokens that have a number, in its order, and gives special ones their flags."""
    numbered: dict[int, _Token] = {}
    if _DECODER in settings:
        entries = _object(settings.pop(_DECODER), f"tokenizer_config.json: {_DECODER}")
        for key, entry in entries.items():
            numbered[_number_in(key)] = _token(_object(entry, f"{_DECODER}: an entry"))
        known = {token.content: token for token in numbered.values()}
    else:
        if files.special_map is not None:
            _read_map(files.special_map, settings, is_old=is_old)
        listed = _listed(files.listed or {}, settings, is_old=is_old)
        numbered = {**dict(listed), **{one.id: _of_layout(one) for one in files.layout}}
        known = {} if is_old else {token.content: token for _, token in listed}
        known |= {one.content: _of_layout(one) for one in files.layout}
    for name, value in settings.items():
        if name.endswith("_token") or name in (_OLD_LIST, _NEW_LIST, _MODELS_OWN):
            settings[name] = _converted(value)
    for name in KINDS:
        value = settings.get(name)
        if isinstance(value, _Special):
            settings[name] = known.get(_text(value), value)
    return [numbered[number] for number in sorted(numbered)]


def _read_map(special_map: Mapping[str, Any], settings: dict[str, Any], *, is_old: bool) -> None:
    """Lets special_tokens_map.json overrule the settings."""
    name_of_list = _OLD_LIST if is_old else _NEW_LIST
    for name, value in special_map.items():
        if name == name_of_list and isinstance(value, list):
            merged = _list(settings.get(name) or [], name)
            for one in value:
                if isinstance(one, Mapping) and "special" in one and not is_old:
                    raise _RefusedError(f"special_tokens_map.json: {name} says what is special")
                token = _token(one, special=True) if isinstance(one, Mapping) else one
                if token not in merged:
                    merged.append(token)
            settings[name] = merged
        elif isinstance(value, Mapping) and (is_old or name != _NEW_LIST):
            settings[name] = _token(value, special=True)
        else:
            settings[name] = value
    if not is_old and isinstance(settings.get(_NEW_LIST), Mapping):
        own = _object(settings[_MODELS_OWN], _MODELS_OWN)
        settings[_MODELS_OWN] = {**own, **settings.pop(_NEW_LIST)}


def _listed(
    listed: Mapping[str, Any], settings: Mapping[str, Any], *, is_old: bool
) -> list[tuple[int, _Token]]:
    """Returns the tokens of added_tokens.json with their numbers."""
    special = {_text(settings[name]) for name in KINDS if settings.get(name)}
    more = settings.get(_OLD_LIST if is_old else _NEW_LIST)
    special.update(map(_text, more if isinstance(more, list) else ()))
    return [(_number(number), _of_list(text, text in special)) for text, number in listed.items()]


def _of_list(text: str, is_special: bool) -> _Token:
    return _bounded(_Token(text, normalized=not is_special, special=is_special))


class _Specials(NamedTuple):
    """Special tokens in their order. named: by name. others: those without one."""

    named: dict[str, _Special]
    others: list[_Special]
    old_list: list[str]

    @classmethod
    def old(cls, settings: Mapping[str, Any]) -> "_Specials":
        others = _specials(settings.get(_OLD_LIST), _OLD_LIST)
        extra = settings.get(_NEW_LIST, {})
        own = _own(_object(extra, f"tokenizer_config.json: {_NEW_LIST}"))
        return cls({**_of_kinds(settings), **own}, others, [_text(one) for one in others])

    @classmethod
    def new(cls, settings: Mapping[str, Any]) -> "_Specials":
        own = {
            name: value
            for name, value in settings.items()
            if name.endswith("_token") and name not in KINDS and isinstance(value, _Special)
        }
        own |= _own(_object(settings[_MODELS_OWN], _MODELS_OWN))
        more = settings.get(_NEW_LIST, settings.get(_OLD_LIST))
        return cls({**_of_kinds(settings), **own}, _specials(more, _NEW_LIST), [])

    def of_release(self, *, is_old: bool) -> list[_Special]:
        """Returns them in the order of a release; of two with one text, release 4 takes one."""
        kinds = [value for name, value in self.named.items() if name in KINDS]
        own = [value for name, value in self.named.items() if name not in KINDS]
        if not is_old:
            return [*kinds, *own, *self.others]
        steps = [[one] for one in kinds] + [self.others] + [[one] for one in own]
        found: list[_Special] = []
        for step in steps:  # within one of them, a text may come twice
            seen = {*map(_text, found)}
            found += [one for one in step if _text(one) not in seen]
        return found

    @property
    def texts(self) -> list[str]:
        return [_text(one) for one in self.of_release(is_old=False)]

    def again(self, *, levels: bool) -> Iterator[_Token]:
        """Yields all as a class of release 5 adds them once more."""
        for one in self.of_release(is_old=False):
            if levels or isinstance(one, str):
                yield _Token(_text(one), special=True)
            else:
                yield one._replace(special=True)

    @property
    def variables(self) -> dict[str, str | list[str]]:
        found: dict[str, str | list[str]] = {name: _text(one) for name, one in self.named.items()}
        return {**found, _OLD_LIST: self.old_list} if self.old_list else found


def _missing(
    table: _Table, numbered: Iterable[_Token], special: _Specials, *, is_old: bool
) -> Iterator[_Token]:
    """Yields what is added: what has a number, there or not, and special tokens that are not."""
    adding: list[_Special] = list(numbered)
    known = {*table.tokens, *map(_text, adding)}
    for one in special.of_release(is_old=is_old):
        # release 4 compares texts with tokens, which are never equal
        is_known = _text(one) in known and (isinstance(one, str) or not is_old)
        if not is_known and _settled(one) not in map(_settled, adding):
            adding.append(one)
    named = {*special.texts} if is_old else {*map(_text, special.named.values())}
    for one in adding:
        if isinstance(one, str):
            yield _Token(one, special=True)
        else:
            yield one._replace(special=one.special or one.content in named)


def _of_kinds(settings: Mapping[str, Any]) -> dict[str, _Special]:
    return _own({name: settings[name] for name in KINDS if settings.get(name) is not None})


def _own(tokens: Mapping[str, Any]) -> dict[str, _Special]:
    return {name: _special(value, name) for name, value in tokens.items()}


def _specials(value: object, name: str) -> list[_Special]:
    return [] if value is None else [_special(one, name) for one in _list(value, name)]


def _special(value: object, name: str) -> _Special:
    if not isinstance(value, _Special):
        raise _RefusedError(f"{name} is neither a text nor a token")
    if isinstance(value, str):
        _bounded(_Token(value))
    return value


def _settled(one: _Special) -> str | AddedToken:
    return one if isinstance(one, str) else one.with_id(0)


def _text(token: object) -> str:
    return token.content if isinstance(token, _Token) else str(token)


def _list(value: object, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise _RefusedError(f"tokenizer_config.json: {name} is no list")
    return list(value)


def _object(value: object, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _RefusedError(f"{name} is no object")
    return value


def _number_in(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise _RefusedError("an added token whose id is no number") from None


def _number(value: object) -> int:
    if not isinstance(value, int):
        raise _RefusedError("an added token whose id is no number")
    return value


def _converted(value: object) -> object:
    """Returns a value of the settings with the tokens that are marked as such."""
    if isinstance(value, Mapping):
        if value.get("__type") == "AddedToken":
            return _token(value)
        return {name: _converted(one) for name, one in value.items()}
    return [_converted(one) for one in value] if isinstance(value, list) else value


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def _token(entry: Mapping[str, Any], *, special: bool = False) -> _Token:
    flags = {name: entry[name] for name in _FLAGS if name in entry}
    content = entry.get("content", "")
    if not isinstance(content, str) or not all(isinstance(one, bool) for one in flags.values()):
        raise _RefusedError("an added token whose text or flags are of another type")
    return _bounded(_Token(content, **(flags | {"special": True} if special else flags)))


def _bounded(token: _Token) -> _Token:
    if len(token.content) > MAX_ADDED_CHARACTERS:
        raise ValueError(f"an added token of more than {MAX_ADDED_CHARACTERS} characters")
    return token


def _of_layout(token: AddedToken) -> _Token:
    flags = token.single_word, token.lstrip, token.rstrip, token.normalized, token.special
    return _Token(token.content, *flags)
