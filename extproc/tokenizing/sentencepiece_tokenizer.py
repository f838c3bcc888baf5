"""Makes tokenizers of SentencePiece models: as transformers does, and as Mistral's library uses it.

Source: transformers 5.19 (models/llama/tokenization_llama.py, convert_slow_tokenizer.py,
tokenization_utils_base.py) and sentencepiece 0.2.3 (bpe_model.cc, normalizer.cc).
"""

import re
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from extproc.tokenizing.byte_pairs import merges
from extproc.tokenizing.sentencepiece_file import Kind, Pieces
from extproc.tokenizing.tokenizer_config import text_of

_MARK = "\u2581"

# Classes of tokenizer_config.json that read such a model in this way.
_CLASSES = (None, "LlamaTokenizer", "LlamaTokenizerFast")

_JOINED = (Kind.NORMAL, Kind.USER_DEFINED, Kind.UNUSED)


def mistral_tokenizer(pieces: Pieces) -> tokenizers.Tokenizer:
    """Returns a tokenizer with the ids of sentencepiece itself, for texts without its own symbols.

    Raises:
        ValueError: the model changes texts in other ways, or has pieces that only occur in others.
    """
    if not pieces.is_plain:
        raise ValueError("its SentencePiece model changes texts in a way that is not known here")
    if any(piece.kind is Kind.UNUSED for piece in pieces.pieces):
        raise ValueError("its SentencePiece model has unused pieces")
    joined = [piece for piece in pieces.pieces if piece.kind in _JOINED]
    order = sorted(joined, key=lambda piece: -piece.score)
    ranks = {piece.text: rank for rank, piece in enumerate(order)}
    tokenizer = _tokenizer(pieces, list(merges(ranks)))
    # in this order: a space at the beginning of a text keeps its own mark
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_MARK), normalizers.Replace(" ", _MARK)]
    )
    return tokenizer


def own_symbols(pieces: Pieces) -> re.Pattern[str] | None:
    """Returns a pattern of the symbols that sentencepiece never cuts, None if there are none."""
    symbols = [piece.text for piece in pieces.pieces if piece.kind is Kind.USER_DEFINED]
    return re.compile("|".join(map(re.escape, symbols))) if symbols else None


def llama_tokenizer(pieces: Pieces, settings: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Returns the tokenizer that transformers makes of a model for LlamaTokenizer.

    settings: of tokenizer_config.json.

    Raises:
        ValueError: the settings name another class.
    """
    if settings.get("tokenizer_class") not in _CLASSES:
        raise ValueError("its class of tokenizer is not known here")
    ids = {piece.text: place for place, piece in enumerate(pieces.pieces)}
    tokenizer = _tokenizer(pieces, _as_transformers(ids))
    is_before = settings.get("add_prefix_space") in (None, True)
    scheme = ("always" if settings.get("legacy") else "first") if is_before else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_MARK, prepend_scheme=scheme, split=False)
    kinds = (Kind.CONTROL, Kind.USER_DEFINED)
    tokenizer.add_tokens(
        [
            AddedToken(piece.text, normalized=False, special=piece.kind is Kind.CONTROL)
            for piece in pieces.pieces
            if piece.kind in kinds
        ]
    )
    before, after = _around(settings, "bos"), _around(settings, "eos")
    around = [(text, ids[text]) for text in (*before, *after) if text in ids]
    if around:
        single = " ".join([*before, "$A", *after])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=single, special_tokens=around
        )
    return tokenizer


def _around(settings: Mapping[str, Any], kind: str) -> list[str]:
    """Returns the special token that is put before or after texts, if one is."""
    text = text_of(settings.get(f"{kind}_token"))
    return [text] if settings.get(f"add_{kind}_token") and text else []


def _tokenizer(pieces: Pieces, pairs: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    ids = {piece.text: place for place, piece in enumerate(pieces.pieces)}
    model = models.BPE(ids, pairs, fuse_unk=True, byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _as_transformers(ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Returns the merges in the order of transformers: by the id of what they make."""
    found = [
        (text[:end], text[end:])
        for text in ids
        for end in range(1, len(text))
        if text[:end] in ids and text[end:] in ids
    ]
    return sorted(found, key=lambda pair: (ids[pair[0] + pair[1]], len(pair[0]), len(pair[1])))
