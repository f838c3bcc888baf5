"""What tokenizer_config.json says besides tokenizer.json, and engines make of it.

Source: transformers 4.57 and 5.19 to 5.23: special tokens that only tokenizer_config.json names are
added, in this order. How texts are cut: `extproc.tokenizing.tokenizer_classes`.
"""

from collections.abc import Collection, Mapping
from typing import Any

# Names of special tokens, in the order in which they are added.
KINDS = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_LISTS = ("additional_special_tokens", "extra_special_tokens")

# Classes whose settings say whether a text begins with the first special token, by default yes.
_BEGINNING = frozenset(
    (
        "LlamaTokenizer",
        "LlamaTokenizerFast",
        "CodeLlamaTokenizer",
        "CodeLlamaTokenizerFast",
        "GemmaTokenizer",
        "GemmaTokenizerFast",
        "CohereTokenizerFast",
    )
)


def text_of(token: object) -> str | None:
    """Returns a special token's text, given as text or as an object with `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def added_by_settings(settings: Mapping[str, Any], known: Collection[str]) -> list[str]:
    """Returns the special tokens that settings name and a tokenizer does not know, in their order.

    settings: of tokenizer_config.json. known: the tokenizer's added tokens.
    """
    named = [settings.get(kind) for kind in KINDS]
    for key in _LISTS:
        more = settings.get(key)
        named += more if isinstance(more, list) else []
    texts = dict.fromkeys(text_of(token) for token in named)
    return [text for text in texts if text and text not in known]


def may_begin_otherwise(settings: Mapping[str, Any], *, is_first: bool) -> bool:
    """Returns whether some engines put a special token before texts, and others do not.

    SGLang (0.5.23, srt/utils/hf_transformers/tokenizer.py) and transformers 4 do as these settings
    say, and transformers 5 as tokenizer.json does. is_first: whether that puts it there.
    """
    adds = settings.get("add_bos_token")
    return settings.get("tokenizer_class") in _BEGINNING and (adds is not False) != is_first
