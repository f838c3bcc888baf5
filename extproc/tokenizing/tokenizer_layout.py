"""Reads a tokenizer.json, and finds where a text may be cut without changing its ids.

Source: the format of the `tokenizers` library (0.22 to 0.23), as `Tokenizer.to_str` writes it.

The `tokenizers` library first extracts from the text the added tokens that are not normalized: the
leftmost first, and the longest of those at the same position. Every later step works on the single
pieces between them. So a cut right before such a token changes nothing, if the token is found there
whatever surrounds it:

- it overlaps no occurrence of another added token, or of itself;
- it takes no white space to its left (lstrip), and does not depend on what is there (single_word);
- it starts with a punctuation mark: not with a part of a word, since an added token to its left may
  depend on that (single_word), nor with white space, which that token may take (rstrip).

Every part but the first begins with its token, so steps that treat the beginning of a text
differently (Metaspace "first") do the same in the part as in the whole.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

# Steps that work on single pieces of text between added tokens, by their serialized names. These
# include Prepend, Strip and Metaspace, which treat every piece like a whole text.
_NORMALIZERS = frozenset(
    (
        "BertNormalizer",
        "ByteLevel",
        "Lowercase",
        "NFC",
        "NFD",
        "NFKC",
        "NFKD",
        "Nmt",
        "Precompiled",
        "Prepend",
        "Replace",
        "Sequence",
        "Strip",
        "StripAccents",
    )
)
_PRE_TOKENIZERS = frozenset(
    (
        "BertPreTokenizer",
        "ByteLevel",
        "CharDelimiterSplit",
        "Digits",
        "FixedLength",
        "Metaspace",
        "Punctuation",
        "Sequence",
        "Split",
        "UnicodeScripts",
        "Whitespace",
        "WhitespaceSplit",
    )
)
_MODELS = frozenset(("BPE", "Unigram", "WordLevel", "WordPiece"))

Step = dict[str, Any]


class AddedToken(msgspec.Struct, frozen=True):
    """One entry of `added_tokens`.

    lstrip, rstrip: it includes the white space on that side.
    single_word: it counts only if no word touches it.
    normalized: it is searched for after normalization, within the pieces between the others.
    """

    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class TokenizerModel(msgspec.Struct, frozen=True):
    """The head of `model`; its vocabulary is skipped.

    dropout: the chance to skip a merge. ignore_merges: a piece that is in the vocabulary is one
    token, whatever its merges. byte_fallback: bytes stand for what is not in the vocabulary.
    fuse_unk: unknown characters in a row are one token.
    """

    type: str = ""
    dropout: float | None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False


class Layout(msgspec.Struct, frozen=True):
    """The parts of a tokenizer.json that are read here."""

    model: TokenizerModel
    added_tokens: list[AddedToken] = []
    normalizer: Step | None = None
    pre_tokenizer: Step | None = None
    post_processor: Step | None = None


class Frame(NamedTuple):
    """The ids that `add_special_tokens` puts around a text's own."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


_layout = msgspec.json.Decoder(Layout)

# Most added tokens, and most characters of one; the largest known models (of speech) have 66,000.
MAX_ADDED_TOKENS = 131_072
MAX_ADDED_CHARACTERS = 1_024


def read(text: str) -> Layout:
    """Returns the layout of a tokenizer.json.

    Raises:
        msgspec.DecodeError: the text is not one.
        ValueError: it has too many added tokens, or too long ones.
    """
    layout = _layout.decode(text)
    if len(layout.added_tokens) > MAX_ADDED_TOKENS:
        raise ValueError(f"more than {MAX_ADDED_TOKENS} added tokens")
    if any(len(token.content) > MAX_ADDED_CHARACTERS for token in layout.added_tokens):
        raise ValueError(f"an added token of more than {MAX_ADDED_CHARACTERS} characters")
    return layout


def tokenizes_piecewise(layout: Layout) -> bool:
    """Returns whether all steps work on single pieces between added tokens.

    The library splits a text at added tokens first. BPE with dropout is random, so its ids cannot
    be repeated or joined.
    """
    return (
        _are_known(layout.normalizer, "normalizers", _NORMALIZERS)
        and _are_known(layout.pre_tokenizer, "pretokenizers", _PRE_TOKENIZERS)
        and layout.model.type in _MODELS
        and not layout.model.dropout
    )


def frame(layout: Layout) -> Frame | None:
    """Returns the ids that the post-processor puts around a text, None if they are unclear."""
    step = layout.post_processor
    if step is None:
        return Frame()
    steps = step.get("processors") if step.get("type") == "Sequence" else [step]
    if not isinstance(steps, list):
        return None
    frames = [_step_frame(one) for one in steps]
    if any(one is None for one in frames):
        return None
    adding = [one for one in frames if one != Frame()]
    return Frame() if not adding else adding[0] if len(adding) == 1 else None


def _are_known(step: Step | None, key: str, known: frozenset[str]) -> bool:
    if step is None:
        return True
    if step.get("type") == "Sequence":
        steps = step.get(key)
        return isinstance(steps, list) and all(_are_known(one, key, known) for one in steps)
    return step.get("type") in known


def _step_frame(step: Step) -> Frame | None:
    match step:
        case {"type": "ByteLevel"}:
            return Frame()  # moves offsets only
        case {"type": "RobertaProcessing" | "BertProcessing", "cls": [_, cls], "sep": [_, sep]}:
            return Frame((cls,), (sep,))
        case {"type": "TemplateProcessing", "single": list(pieces), "special_tokens": dict(known)}:
            return _template_frame(pieces, known)
        case _:
            return None


def _template_frame(pieces: list[Step], known: dict[str, Any]) -> Frame | None:
    """Parses [{"SpecialToken": {"id": name}}, {"Sequence": {"id": "A"}}, ...]."""
    sides: tuple[list[int], ...] = ([],)
    for piece in pieces:
        match piece:
            case {"SpecialToken": {"id": name}} if name in known:
                sides[-1].extend(known[name]["ids"])
            case {"Sequence": {"id": "A"}} if len(sides) == 1:
                sides = (sides[0], [])
            case _:
                return None
    return Frame(tuple(sides[0]), tuple(sides[1])) if len(sides) > 1 else None


# Least length of a part: this many characters, or the text before it divided by this share if that
# is more; cuts cost time.
PART_CHARACTERS = 2_048
_PART_SHARE = 8

# Text of this length or more between two tokens counts as a message, shorter text as a role's name.
MESSAGE_CHARACTERS = 24

# Texts are cut only at tokens with one of the most common first characters, up to this many: each
# needs one search through the text.
_MAX_FIRST_CHARACTERS = 4

# Longer tokens would nest the search pattern too deeply; no known tokenizer has any.
_MAX_TOKEN_CHARACTERS = 64

# Where added tokens have more characters than this, those of each squared, texts are not cut: to
# find out which overlap would take longer than a second.
_MAX_OVERLAP_WORK = 2_097_152

# Only ASCII, since versions of Unicode differ; the underscore is part of words.
_FIRST_CHARACTERS = frozenset(string.punctuation) - {"_"}

# The start of a cut, and the end of the token after it, in characters.
Span = tuple[int, int]


def sparse(cut: int) -> int:
    """Returns the least distance from a cut to the next, in characters, so that cuts are few."""
    return max(PART_CHARACTERS, cut // _PART_SHARE)


def cut_everywhere(_: int) -> int:
    """Returns a least distance of one character: cuts at every possible position."""
    return 1


class Cutter:
    """Finds the places at which texts can be cut without changing their ids.

    added: all added tokens of a tokenizer.
    distance: returns the least distance from a cut to the next, except to the last one.
    """

    def __init__(
        self, added: Sequence[AddedToken], distance: Callable[[int], int] = sparse
    ) -> None:
        self._distance = distance
        matched = {token.content for token in added if _is_matched(token)}
        is_long = sum(len(content) ** 2 for content in matched) > _MAX_OVERLAP_WORK
        overlapping = matched if is_long else _overlapping(matched)
        contents = {one.content for one in added if _stands_alone(one)} - overlapping
        firsts = Counter(content[:1] for content in contents).most_common(_MAX_FIRST_CHARACTERS)
        groups = [{one for one in contents if one[:1] == first} for first, _ in firsts]
        self.contents = frozenset().union(*groups)
        self._patterns = [re.compile(_pattern(group)) for group in groups]

    def find(self, text: str, after: int) -> list[Span]:
        """Returns cuts in order, at the least distance from `after` and each other, and the last.

        The last are the one before the last message, where other conversations with the same
        beginning may differ, and the very last one, where the next turn continues.

        after: the position of a cut, or 0.
        """
        far = after + self._distance(after)
        spans = list(self._spans(text, far)) if far < len(text) else []
        start, end = spans[-1] if spans else (after, after + 1)
        window = (end, start + self._distance(start) + _MAX_TOKEN_CHARACTERS)
        close = [match.span() for one in self._patterns for match in one.finditer(text, *window)]
        if len(self._patterns) > 1:
            close.sort()
        return spans + _last(close)

    def first(self, text: str) -> int:
        """Returns the first place at which a text can be cut, whatever is around it; -1 if none."""
        places = [match.start() for one in self._patterns for match in one.finditer(text)]
        return min(places, default=-1)

    def _spans(self, text: str, position: int) -> Iterator[Span]:
        coming = [pattern.search(text, position) for pattern in self._patterns]
        while spans := [match.span() for match in coming if match]:
            nearest = min(spans)
            yield nearest
            position = nearest[0] + self._distance(nearest[0])
            for number, match in enumerate(coming):
                if match and match.start() < position:
                    coming[number] = self._patterns[number].search(text, position)


def _last(close: list[Span]) -> list[Span]:
    """Returns the last cut, preceded by the one before the last message if there is one."""
    following = close[-1:]
    for span in reversed(close[:-1]):
        if following[0][0] - span[1] >= MESSAGE_CHARACTERS:
            return [span, close[-1]]
        following = [span]
    return close[-1:]


def _is_matched(token: AddedToken) -> bool:
    """Returns whether a token is extracted from the text before normalization."""
    return bool(token.content) and not token.normalized


def _stands_alone(token: AddedToken) -> bool:
    """Returns whether a token does not depend on its surroundings, except for overlaps."""
    return (
        _is_matched(token)
        and not token.lstrip
        and not token.single_word
        and token.content[0] in _FIRST_CHARACTERS
        and len(token.content) <= _MAX_TOKEN_CHARACTERS
    )


def _overlapping(tokens: set[str]) -> set[str]:
    """Returns the tokens that can overlap with another token or with themselves in a text."""
    beginning: dict[str, set[str]] = {}
    for token in tokens:
        for end in range(1, len(token)):
            beginning.setdefault(token[:end], set()).add(token)
    found: set[str] = set()
    for token in tokens:
        for start in range(len(token)):
            rest = token[start:]
            others = {rest[:end] for end in range(1, len(rest) + 1)} & tokens
            if start:
                others |= beginning.get(rest, set())
            else:
                others.discard(token)
            if others:
                found |= others | {token}
    return found


def _pattern(tokens: set[str]) -> str:
    """Returns a pattern that finds any of the tokens, none of which begins another."""
    tree: dict[str, Any] = {}
    for token in tokens:
        node = tree
        for character in token:
            node = node.setdefault(character, {})
    return _branches(tree)


def _branches(tree: dict[str, Any]) -> str:
    parts = [re.escape(one) + _branches(rest) for one, rest in sorted(tree.items())]
    return parts[0] if len(parts) == 1 else "(?:" + "|".join(parts) + ")" if parts else ""
