"""What a tokenizer.json says about its steps, as far as it decides where a text may be cut.

Source: the format of the `tokenizers` library (0.22 to 0.23), as `Tokenizer.to_str` writes it.
"""

from typing import Any, NamedTuple

import msgspec

# Steps that look at one piece of text between added tokens at a time, by their serialized names.
# Prepend, Strip and Metaspace too: what they do to a text they do to every piece of it.
_NORMALIZERS = frozenset(
    (
        *("BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt"),
        *("Precompiled", "Prepend", "Replace", "Sequence", "Strip", "StripAccents"),
    )
)
_PRE_TOKENIZERS = frozenset(
    (
        *("BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength"),
        *("Metaspace", "Punctuation", "Sequence", "Split", "UnicodeScripts", "Whitespace"),
        "WhitespaceSplit",
    )
)
_MODELS = frozenset(("BPE", "Unigram", "WordLevel", "WordPiece"))

Step = dict[str, Any]


class AddedToken(msgspec.Struct, frozen=True):
    """One entry of `added_tokens`.

    lstrip, rstrip: it takes the white space on that side with it.
    single_word: it counts only where no word touches it.
    normalized: it is looked for after normalization, within the pieces that the others leave.
    """

    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = True
    special: bool = False


class Model(msgspec.Struct, frozen=True):
    """The head of `model`; its vocabulary is skipped. dropout: the chance to leave out a merge."""

    type: str = ""
    dropout: float | None = None


class Layout(msgspec.Struct, frozen=True):
    """The parts of a tokenizer.json that are read here."""

    model: Model
    added_tokens: list[AddedToken] = []
    normalizer: Step | None = None
    pre_tokenizer: Step | None = None
    post_processor: Step | None = None


class Frame(NamedTuple):
    """The ids that `add_special_tokens` puts around a text's own."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()


_layout = msgspec.json.Decoder(Layout)


def read(text: str) -> Layout:
    """Reads a tokenizer.json.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _layout.decode(text)


def tokenizes_piecewise(layout: Layout) -> bool:
    """Whether all steps are known to look at one piece between added tokens at a time.

    The library splits a text at added tokens first. BPE with dropout draws lots, so that its ids
    cannot be repeated, let alone put together.
    """
    return (
        _are_known(layout.normalizer, "normalizers", _NORMALIZERS)
        and _are_known(layout.pre_tokenizer, "pretokenizers", _PRE_TOKENIZERS)
        and layout.model.type in _MODELS
        and not layout.model.dropout
    )


def frame(layout: Layout) -> Frame | None:
    """What the post-processor puts around a single text; None where that cannot be told."""
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
    """From [{"SpecialToken": {"id": name}}, {"Sequence": {"id": "A"}}, ...]."""
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
