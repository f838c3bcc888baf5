"""Gives a tokenizer of the library `tokenizers` the added tokens that engines' have."""

import json
from collections.abc import Mapping

import tokenizers

from extproc.tokenizing.added_tokens import ModelIds
from extproc.tokenizing.tokenizer_layout import AddedToken


def model_ids(library: tokenizers.Tokenizer) -> ModelIds:
    """Returns the vocabulary of a tokenizer without its added tokens."""
    return ModelIds(library.model.token_to_id, library.get_vocab_size(with_added_tokens=False))


def added_in(library: tokenizers.Tokenizer) -> dict[str, AddedToken]:
    """Returns the added tokens of a tokenizer by their texts."""
    return {
        one.content: AddedToken(
            number,
            one.content,
            one.single_word,
            one.lstrip,
            one.rstrip,
            one.normalized,
            one.special,
        )
        for number, one in sorted(library.get_added_tokens_decoder().items())
    }


def with_added(
    library: tokenizers.Tokenizer, added: Mapping[str, AddedToken]
) -> tokenizers.Tokenizer:
    """Returns a tokenizer with exactly these added tokens: the same one, if it lacks none.

    It is built anew, which takes as long as to load it, only where it has tokens that are not
    among them, or gives them other ids.
    """
    known = added_in(library)
    if known.keys() <= added.keys():
        lacking = [token for token in added.values() if known.get(token.content) != token]
        library.add_tokens([_for_library(token) for token in sorted(lacking, key=_id)])
        if added_in(library) == added:
            return library
    source = json.loads(library.to_str())
    source["added_tokens"] = [
        {"id": token.id, "content": token.content, **_flags(token)}
        for token in sorted(added.values(), key=_id)
    ]
    return tokenizers.Tokenizer.from_str(json.dumps(source))


def _id(token: AddedToken) -> int:
    return token.id


def _flags(token: AddedToken) -> dict[str, bool]:
    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return {name: getattr(token, name) for name in names}


def _for_library(token: AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(token.content, **_flags(token))
