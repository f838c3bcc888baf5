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

# Classes whose settings say whether a text begins with the first special token, by default yes;
# and that token, if settings do not name it.
_BEGINNING = {
    "LlamaTokenizer": "<s>",
    "CodeLlamaTokenizer": "<s>",
    "GemmaTokenizer": "<bos>",
    "CohereTokenizer": "<BOS_TOKEN>",
}
_GPT_NEOX = "GPTNeoXTokenizer"


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
    say, and transformers 5 as tokenizer.json does; GPT-NeoX's class, in some releases, as neither.
    frame: that tokenizer.json adds. id_of: returns the id of a token.
    """
    name = str(settings.get("tokenizer_class")).removesuffix("Fast")
    adds_last = bool(settings.get("add_eos_token"))
    if name == _GPT_NEOX:
        return bool(settings.get("add_bos_token")) or adds_last or frame != Frame()
    if name not in _BEGINNING:
        return False
    adds_first = settings.get("add_bos_token") is not False
    first = text_of(settings.get("bos_token", _BEGINNING[name])) if adds_first else None
    last = text_of(settings.get("eos_token", "</s>")) if adds_last else None
    around = (() if one is None else (id_of(one),) for one in (first, last))
    # a token that tokenizer.json does not have is added, with an id of its own
    return frame != tuple(around)
