"""Texts that the tokenizer of vLLM's Rust front end cuts otherwise than the library: to be doubted.

Source: fastokens 0.2.1, which vLLM 0.33.0's Rust front end has. Where a tokenizer cuts as GPT-2's
does, it takes a contraction behind an apostrophe in any case, and not in small letters alone.
"""

import re

from extproc.tokenizing.tokenizer_layout import Layout, Step

# What GPT-2's own rule cuts off, and what the other one does besides.
_SMALL = frozenset(("'s", "'t", "'re", "'ve", "'m", "'ll", "'d"))
_ANY_CASE = re.compile(r"'(?:ll|ve|re|[sdmt])", re.IGNORECASE)


def may_be_cut_otherwise(layout: Layout, text: str) -> bool:
    """Returns whether the front end may have other ids for a text than a tokenizer.json says."""
    if "'" not in text or not _cuts_as_gpt2(layout.pre_tokenizer):
        return False
    return any(found not in _SMALL for found in _ANY_CASE.findall(text))


def _cuts_as_gpt2(step: Step | None) -> bool:
    if step is None:
        return False
    if step.get("type") == "Sequence":
        return any(map(_cuts_as_gpt2, step.get("pretokenizers") or ()))
    return step.get("type") == "ByteLevel" and step.get("use_regex", True) is not False
