"""Small tokenizers of the kinds that models have, trained here, to compare with the real library.

They include added tokens with every flag, and added tokens that overlap.
"""

import functools
from collections.abc import Callable
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = (
    "The quick brown fox jumps over the lazy dog. It's what they've said, isn't it?",
    "def f(x):\n    return x + 1\n\n\nprint(f(41))  # 42",
    "Größe und Maß, naïve café, Быстрая лиса, 快速的狐狸 跳过 懒狗",
    "one two  three   four\tfive\n\nsix 123 4567 3.14 user system assistant hello world",
) * 3

UNKNOWN = "<unk>"
CHAT = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]")

# Tokens that absorb spaces, tokens that match whole words only, tokens that share characters.
AWKWARD = (
    AddedToken("<left>", lstrip=True, normalized=False),
    AddedToken("<right>", rstrip=True, normalized=False),
    AddedToken("<both>", lstrip=True, rstrip=True, normalized=False),
    AddedToken("<word>", single_word=True, normalized=False),
    AddedToken("fox", single_word=True, normalized=False),
    AddedToken("<Norm>", normalized=True),
    AddedToken("lazy", normalized=True),
    AddedToken("<a>", normalized=False),
    AddedToken("<a><b>", normalized=False),
    AddedToken("<b><c>", normalized=False),
    AddedToken("  ", normalized=False),
    AddedToken("\n<line>", normalized=False),
    AddedToken("word<in>", normalized=False),
)

PIECES = (*CHAT, *(token.content for token in AWKWARD))

LLAMA_3 = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _bpe(**fields: Any) -> Tokenizer:
    return Tokenizer(models.BPE(**fields))


def _trained(tokenizer: Tokenizer, trainer: Any) -> Tokenizer:
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in CHAT])
    return tokenizer


def _bpe_trained(tokenizer: Tokenizer, alphabet: list[str] | None = None) -> Tokenizer:
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        special_tokens=[UNKNOWN],
        initial_alphabet=alphabet or [],
    )
    return _trained(tokenizer, trainer)


def _ids(tokenizer: Tokenizer, one: str, other: str) -> tuple[tuple[str, int], tuple[str, int]]:
    vocabulary = tokenizer.get_vocab()
    return (one, vocabulary[one]), (other, vocabulary[other])


def _framed(tokenizer: Tokenizer, single: str) -> Any:
    ids = _ids(tokenizer, "<s>", "</s>")
    return processors.TemplateProcessing(single=single, special_tokens=list(ids))


def byte_level() -> Tokenizer:
    tokenizer = _bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    return _bpe_trained(tokenizer, pre_tokenizers.ByteLevel.alphabet())


def byte_level_with_prefix_space() -> Tokenizer:
    tokenizer = _bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    _bpe_trained(tokenizer, pre_tokenizers.ByteLevel.alphabet())
    sides = _ids(tokenizer, "</s>", "<s>")
    tokenizer.post_processor = processors.RobertaProcessing(*sides)
    return tokenizer


def llama_3() -> Tokenizer:
    tokenizer = _bpe(ignore_merges=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(LLAMA_3, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    _bpe_trained(tokenizer, pre_tokenizers.ByteLevel.alphabet())
    template = _framed(tokenizer, "<s> $A")
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return tokenizer


def nfc_byte_level() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = _bpe(unk_token=UNKNOWN, byte_fallback=True, fuse_unk=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme=scheme, split=scheme != "first"
    )
    _bpe_trained(tokenizer)
    tokenizer.post_processor = _framed(tokenizer, "<s> $A </s>")
    return tokenizer


def legacy_llama() -> Tokenizer:
    tokenizer = _bpe(unk_token=UNKNOWN, fuse_unk=True)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    _bpe_trained(tokenizer)
    tokenizer.post_processor = _framed(tokenizer, "<s> $A")
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=300, show_progress=False, special_tokens=[UNKNOWN], unk_token=UNKNOWN
    )
    _trained(tokenizer, trainer)
    tokenizer.post_processor = _framed(tokenizer, "$A </s>")
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, show_progress=False, special_tokens=[UNKNOWN]
    )
    _trained(tokenizer, trainer)
    sides = _ids(tokenizer, "</s>", "<s>")
    tokenizer.post_processor = processors.BertProcessing(*sides)
    return tokenizer


def stripping() -> Tokenizer:
    tokenizer = _bpe(unk_token=UNKNOWN)
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Strip(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.UnicodeScripts(),
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Punctuation("contiguous"),
        ]
    )
    return _bpe_trained(tokenizer)


_MAKERS: dict[str, Callable[[], Tokenizer]] = {
    "byte level": byte_level,
    "byte level, prefix space": byte_level_with_prefix_space,
    "byte level, NFC": nfc_byte_level,
    "Llama 3": llama_3,
    "Metaspace first": functools.partial(metaspace, "first"),
    "Metaspace always": functools.partial(metaspace, "always"),
    "Metaspace never": functools.partial(metaspace, "never"),
    "legacy Llama": legacy_llama,
    "Unigram": unigram,
    "WordPiece": word_piece,
    "stripping": stripping,
}

KINDS = [*_MAKERS, *(f"{name}, awkward tokens" for name in _MAKERS)]


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    """Returns the tokenizer of one of KINDS, made once per process."""
    name, _, awkward = kind.partition(", awkward")
    tokenizer = _MAKERS[name]()
    if awkward:
        tokenizer.add_tokens(list(AWKWARD))
    return tokenizer
