"""What tokenizer_config.json says about the special tokens around a text.

Its other tokens: `extproc.tokenizing.added_tokens`. How texts are cut:
`extproc.tokenizing.tokenizer_classes`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from extproc.tokenizing.tokenizer_layout import Frame

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
