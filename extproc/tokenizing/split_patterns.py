"""The patterns by which known byte-level tokenizers cut a text into pieces.

A pattern comes from a model's files and would run on every text, so only known ones are used: of
these the two engines of regular expressions, tiktoken's and that of `tokenizers`, are known to make
the same pieces of every text, in a time that grows as the text does. Every character matches one.

Source: tekken.json of Mistral (mistral-common 1.13), tokenization_kimi.py of Kimi K2; the
tokenizer.json of Qwen 3 and the class of Qwen 3.5 (transformers 5.19, models/qwen3_5).
"""

# Letters with marks, and how English words end.
_LETTERS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAPITALS = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_SPACES = (r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+")

TEKKEN = "|".join(
    (_BEFORE + _LETTERS, _BEFORE + _CAPITALS, r"\p{N}", r" ?[^\s\p{L}\p{N}]+[\r\n/]*", *_SPACES)
)


def _not_chinese(pattern: str) -> str:
    return pattern.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")


KIMI = "|".join(
    (
        r"[\p{Han}]+",
        _BEFORE + _not_chinese(_LETTERS) + _ENDING,
        _BEFORE + _not_chinese(_CAPITALS) + _ENDING,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        *_SPACES,
    )
)


def _qwen(letter: str, mark: str) -> str:
    words = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", rf"{_BEFORE}{letter}+", r"\p{N}")
    return "|".join((*words, rf" ?[^\s\p{{L}}{mark}\p{{N}}]+[\r\n]*", *_SPACES))


# Qwen 3.5 counts marks as letters.
QWEN2 = _qwen(r"\p{L}", "")
QWEN3_5 = _qwen(r"[\p{L}\p{M}]", r"\p{M}")

_KNOWN = frozenset((TEKKEN, KIMI))


def check_pattern(pattern: str) -> None:
    """Checks that a pattern is a known one.

    Raises:
        ValueError: it is not; it is not shown, since it may be long.
    """
    if pattern not in _KNOWN:
        raise ValueError("its texts are cut by a pattern that is not known here")
