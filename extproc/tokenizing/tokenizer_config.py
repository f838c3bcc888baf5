"""What tokenizer_config.json says besides tokenizer.json, and engines make of it.

Source: transformers 4.57 and 5.19 to 5.23: special tokens that only tokenizer_config.json names are
added, in this order. How texts are cut: `extproc.tokenizing.tokenizer_classes`.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from extproc.tokenizing.tokenizer_layout import Frame

# Names of special tokens, in the order in which they are added.
KINDS = tuple(f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
_LISTS = ("additional_special_tokens", "extra_special_tokens")

# Classes whose settings say which special tokens stand around a text; the value, whether one stands
# before it if they do not say.
_FRAMING = {
    "LlamaTokenizer": True,
    "CodeLlamaTokenizer": True,
    "GemmaTokenizer": True,
    "CohereTokenizer": True,
    "GPTNeoXTokenizer": False,
}


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


def may_be_framed_otherwise(
    settings: Mapping[str, Any], frame: Frame | None, id_of: Callable[[str], int | None]
) -> bool:
    """Returns whether some engines put other special tokens around texts than others.

    SGLang (0.5.23, srt/utils/hf_transformers/tokenizer.py) and transformers 4 do as these settings
    say, and transformers 5 as tokenizer.json does. frame: that tokenizer.json adds. id_of: returns
    the id of a token.
    """
    by_default = _FRAMING.get(str(settings.get("tokenizer_class")).removesuffix("Fast"))
    if by_default is None:
        return False
    adds = settings.get("add_bos_token")
    first = _ids(settings.get("bos_token"), id_of) if adds or (adds is None and by_default) else ()
    last = _ids(settings.get("eos_token"), id_of) if settings.get("add_eos_token") else ()
    return frame != Frame(first, last)


def _ids(token: object, id_of: Callable[[str], int | None]) -> tuple[int, ...]:
    found = id_of(text_of(token) or "")
    return () if found is None else (found,)
