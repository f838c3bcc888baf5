"""Which tokenizers some releases of transformers rebuild, so that they cut texts otherwise.

Since release 5, most tokenizer classes take only the vocabulary and the merges of tokenizer.json;
how a text is normalized and cut is written in the class. It is the class that tokenizer_config.json
or config.json names; for some types of models, the one that is registered for the type. Where the
class does what tokenizer.json says, nothing changes.

Source: transformers 4.51 to 5.23 (models/auto/tokenization_auto.py, tokenization_utils_fast.py,
tokenization_utils_tokenizers.py and the classes), each run on models of 44 types with 13 classes.
vLLM takes release 4 until 0.18, 5.5 and newer from 0.24, and 5.16 to 5.19 in 0.32; SGLang takes
4.57 in 0.5.9, 5.3 in 0.5.10 and 5.19 in 0.5.23. Releases differ in which class they take for which
type of model (DeepSeek V3's tokenizer.json is kept by 5.9, but not by 5.6), so none counts here.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import structs

from extproc.tokenizing.split_patterns import QWEN2, QWEN3_5
from extproc.tokenizing.tokenizer_config import text_of
from extproc.tokenizing.tokenizer_layout import Layout, Step, TokenizerModel

# Classes that do what tokenizer.json says, in every release.
_KEEPING = frozenset(("PreTrainedTokenizer", "PreTrainedTokenizerFast", "TokenizersBackend"))

# Settings by which texts become other tokens: special tokens are cut like words, another file is
# read by some releases, texts are cut by another pattern.
_UNCLEAR = ("split_special_tokens", "fast_tokenizer_files", "fix_mistral_regex", "from_slow")

# Types of models for which newer releases take this class, whatever class is named.
_REGISTERED = {
    "qwen2": "Qwen2Tokenizer",
    "qwen3_5": "Qwen3_5Tokenizer",
    "qwen3_5_text": "Qwen3_5Tokenizer",
    "qwen3_5_moe": "Qwen3_5Tokenizer",
    "qwen3_5_moe_text": "Qwen3_5Tokenizer",
    "qwen4_exp": "Qwen3_5Tokenizer",
}

_NFC = {"type": "NFC"}
_MARK = "\u2581"
_MARKED = {"type": "Replace", "pattern": {"String": " "}, "content": _MARK}
_AT_SPACES = {
    "type": "Split",
    "pattern": {"String": " "},
    "behavior": "MergedWithPrevious",
    "invert": False,
}
_FIRST_MARK = {
    "type": "Metaspace",
    "replacement": _MARK,
    "prepend_scheme": "first",
    "split": False,
}
_DIGITS = {"type": "Digits", "individual_digits": True}

_PAIRS = TokenizerModel(type="BPE")
_WITH_BYTES = TokenizerModel(type="BPE", fuse_unk=True, byte_fallback=True)

# How a class normalizes a text, cuts it, and joins the pieces.
_Steps = tuple[Step | None, Step | None, TokenizerModel]


def may_be_cut_otherwise(
    settings: Mapping[str, Any], config: Mapping[str, Any], layout: Layout
) -> bool:
    """Returns whether some releases of transformers cut texts otherwise than tokenizer.json says.

    settings: of tokenizer_config.json. config: of config.json. layout: of tokenizer.json.
    """
    if any(settings.get(name) for name in _UNCLEAR):
        return True
    auto_map = settings.get("auto_map")
    if isinstance(auto_map, list) or (isinstance(auto_map, dict) and "AutoTokenizer" in auto_map):
        return True  # code of the model's own, which engines run if they are told to
    if _has_prefix_space(layout) not in (None, bool(settings.get("add_prefix_space"))):
        return True  # release 4 sets it as the settings say
    classes = classes_of(settings, config)
    steps = _steps_of(layout)
    if classes == (None, None):
        return "model_type" in config  # a class may be registered for the type
    return any(
        name not in _KEEPING and steps not in _of_class(name, settings) for name in classes if name
    )


def classes_of(
    settings: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[str | None, str | None]:
    """Returns the class that the files name, and the one that is registered for the model's type.

    Without "Fast" at the end; None where there is none.
    """
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    registered = _REGISTERED.get(str(config.get("model_type")))
    return None if not named else str(named).removesuffix("Fast"), registered


def _of_class(name: str, settings: Mapping[str, Any]) -> Iterator[_Steps]:
    """Yields what releases make of a class, nothing if that is not known here."""
    has_prefix = bool(settings.get("add_prefix_space"))
    whole = {"type": "ByteLevel", "add_prefix_space": has_prefix, "use_regex": True}
    match name:
        case "GPT2Tokenizer":
            yield None, whole, _PAIRS
        case "GPTNeoXTokenizer":
            yield _NFC, whole, _PAIRS
        case "CohereTokenizer":
            yield _NFC, _in_order(_DIGITS, whole), _PAIRS
        case "Qwen2Tokenizer":
            yield _NFC, _by_pattern(QWEN2, has_prefix=has_prefix), _PAIRS
        case "Qwen3_5Tokenizer":
            yield _NFC, _by_pattern(QWEN3_5, has_prefix=has_prefix), _PAIRS
        case "GemmaTokenizer":
            unknown = text_of(settings.get("unk_token")) or "<unk>"
            pairs = structs.replace(_WITH_BYTES, unk_token=unknown)
            # a text has no spaces left when it is cut at them
            yield _MARKED, None, pairs
            yield _MARKED, _AT_SPACES, pairs
        case "LlamaTokenizer":
            if not settings.get("legacy") and settings.get("add_prefix_space") is None:
                yield None, _FIRST_MARK, _WITH_BYTES


def _by_pattern(pattern: str, *, has_prefix: bool) -> Step:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    rest = {"type": "ByteLevel", "add_prefix_space": has_prefix, "use_regex": False}
    return _in_order(split, rest)


def _in_order(*steps: Step) -> Step:
    return {"type": "Sequence", "pretokenizers": list(steps)}


def _steps_of(layout: Layout) -> _Steps:
    """Returns what tokenizer.json says, in the form of the classes above."""
    model = structs.replace(
        layout.model,
        unk_token=layout.model.unk_token or None,
        continuing_subword_prefix=layout.model.continuing_subword_prefix or None,
        end_of_word_suffix=layout.model.end_of_word_suffix or None,
    )
    return _plain(layout.normalizer), _plain(layout.pre_tokenizer), model


def _plain(step: Step | None) -> Step | None:
    """Returns a step without what changes no ids; None for one that does nothing."""
    if step is None:
        return None
    for key in ("normalizers", "pretokenizers"):
        steps = step.get(key)
        if isinstance(steps, Sequence):
            return {**step, key: [_plain(one) for one in steps]} if steps else None
    return {key: value for key, value in step.items() if key != "trim_offsets"}


def _has_prefix_space(layout: Layout) -> bool | None:
    """Returns whether tokenizer.json puts a space before every text, None if it does not say."""
    found = (layout.pre_tokenizer or {}).get("add_prefix_space")
    return found if isinstance(found, bool) else None
