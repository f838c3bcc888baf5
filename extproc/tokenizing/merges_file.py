"""Makes a tokenizer of vocab.json and merges.txt, as transformers does for GPT-2 and Qwen 2.

Source: transformers 5.19 (models/gpt2/tokenization_gpt2.py, models/qwen2/tokenization_qwen2.py).
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from extproc.tokenizing.byte_pairs import MAX_TOKENS
from extproc.tokenizing.split_patterns import QWEN2

_GPT2 = ("GPT2Tokenizer", "GPT2TokenizerFast")
_QWEN2 = ("Qwen2Tokenizer", "Qwen2TokenizerFast")

# Most characters of a token in all merges.
MAX_TOKEN_CHARACTERS = 4_096

_vocabulary = msgspec.json.Decoder(dict[str, int])


def merges_tokenizer(
    vocabulary: bytes, merges: bytes, settings: Mapping[str, Any]
) -> tokenizers.Tokenizer:
    """Returns the tokenizer of a vocab.json and a merges.txt.

    settings: of tokenizer_config.json.

    Raises:
        ValueError: they are none, or the settings name another class.
    """
    # before they are decoded, which would take a gigabyte or two
    if vocabulary.count(b'":') > 2 * MAX_TOKENS or merges.count(b"\n") > 2 * MAX_TOKENS:
        raise ValueError("vocab.json has too many tokens, or merges.txt too many lines")
    name = settings.get("tokenizer_class")
    if name not in _GPT2 and name not in _QWEN2:
        raise ValueError("its class of tokenizer is not known here")
    try:
        ids = _vocabulary.decode(vocabulary)
    except msgspec.DecodeError:
        raise ValueError("no vocab.json") from None
    if len(ids) > MAX_TOKENS or len(set(ids.values())) != len(ids):
        raise ValueError("vocab.json has too many tokens, or two with the same id")
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, list(_pairs(merges.decode(), ids))))
    prefix = bool(settings.get("add_prefix_space"))
    if name in _GPT2:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    else:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(QWEN2), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    _add_named(tokenizer, settings.get("added_tokens_decoder"))
    return tokenizer


def _pairs(merges: str, ids: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yields the pairs that merges.txt joins, in their order."""
    for number, line in enumerate(merges.split("\n"), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        left, space, right = line.rstrip("\r").partition(" ")
        is_pair = space and " " not in right and left + right in ids
        if not is_pair or len(line) > MAX_TOKEN_CHARACTERS:
            raise ValueError(f"line {number} of merges.txt is no pair of the vocabulary")
        yield left, right


def _add_named(tokenizer: tokenizers.Tokenizer, named: object) -> None:
    """Adds the tokens of tokenizer_config.json's added_tokens_decoder, under their ids."""
    for written, token in named.items() if isinstance(named, dict) else ():
        if not isinstance(token, dict) or not isinstance(token.get("content"), str):
            raise ValueError("tokenizer_config.json has special tokens of another form")
        flags = {
            key: bool(token.get(key))
            for key in ("lstrip", "rstrip", "single_word", "normalized", "special")
        }
        tokenizer.add_tokens([AddedToken(token["content"], **flags)])
        if str(tokenizer.token_to_id(token["content"])) != written:
            raise ValueError("tokenizer_config.json names other ids than the vocabulary has")
