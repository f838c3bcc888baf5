"""Loads a model's vocabulary: a tokenizer.json, or another file that is converted.

What is converted gives the ids of the library that engines use for such a file:

- tekken.json and tokenizer.model.v*: mistral-common (tiktoken, sentencepiece);
- tiktoken.model: the tokenizer in a Kimi checkpoint's own code, which uses tiktoken;
- tokenizer.model: transformers' LlamaTokenizer;
- vocab.json with merges.txt: transformers' GPT2Tokenizer and Qwen2Tokenizer.

A conversion takes a second of CPU, half a second more than reading a tokenizer.json of that size,
so nothing is kept on the disk. What converts a kind is imported for the first model that needs it.
"""

import logging
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import processors

from extproc.base.tokenizer_files import read_file
from extproc.requests.prompt import REBUILT
from extproc.tokenizing.encoder_choice import RefusedCut
from extproc.tokenizing.kimi_code import MOST_ALIKE, MOST_AT_ONCE, KimiCode, read_code

log = logging.getLogger("kvsteer.tokens")

_REMEDY = (
    "make a tokenizer.json of it with the engine's libraries"
    " (AutoTokenizer.from_pretrained(...).save_pretrained(...)), or set tokenizer: {remote: true}"
)

# The code of Kimi's tokenizer cuts such texts before it tokenizes them.
_CUT_BY_KIMI = RefusedCut(
    re.compile(
        rf"(?<!\S)\S{{{MOST_ALIKE + 1}}}|(?<!\s)\s{{{MOST_ALIKE + 1}}}|(?s:.{{{MOST_AT_ONCE + 1}}})"
    ),
    MOST_ALIKE + 1,
)


class Vocabulary(NamedTuple):
    """A vocabulary for `tokenizers`.

    forms: those of all its texts; what is converted needs a proof. refused: texts of which it does
    not have the engine's ids. kimi: what the code of the checkpoint's tokenizer does. version: how
    Mistral's library writes conversations, "" if it does not. controls: the ids of control tokens
    that no text becomes. settings: as in `Tekken`.
    """

    library: tokenizers.Tokenizer
    forms: int = REBUILT
    refused: RefusedCut | None = None
    kimi: KimiCode | None = None
    version: str = ""
    controls: Mapping[str, int] = {}
    settings: Mapping[str, Any] | None = None


def read_vocabulary(file: Path, settings: Mapping[str, Any]) -> Callable[[], Vocabulary]:
    """Reads a vocabulary's files, and returns what builds it, which takes a second or two.

    settings: of tokenizer_config.json.

    Raises:
        OSError: a file cannot be read. ValueError: it is too large.
    """
    content = read_file(file)
    if file.name == "tekken.json":
        return _converted(file, lambda: _of_tekken(content))
    if file.name.startswith("tokenizer.model.v"):
        return _converted(file, lambda: _of_mistral_pieces(content, file.suffix[1:]))
    if file.name == "tiktoken.model":
        code = file.parent / "tokenization_kimi.py"
        source = read_file(code) if code.is_file() else b""
        return _converted(file, lambda: _of_kimi(content, source, settings))
    if file.name == "tokenizer.model":
        return _converted(file, lambda: _of_pieces(content, settings))
    if file.name == "vocab.json":
        merges = read_file(file.with_name("merges.txt"))
        return _converted(file, lambda: _of_merges(content, merges, settings))
    text = content.decode()
    return lambda: Vocabulary(tokenizers.Tokenizer.from_str(text), forms=0)


def _converted(file: Path, convert: Callable[[], Vocabulary]) -> Callable[[], Vocabulary]:
    """Returns what converts a vocabulary, and logs how long it takes."""

    def work() -> Vocabulary:
        began = time.thread_time()
        try:
            vocabulary = convert()
        except ValueError as error:
            raise ValueError(f"{error}; {_REMEDY}") from None
        seconds = time.thread_time() - began
        log.info("%s: converted in %.1f s of CPU", file, seconds)
        return vocabulary

    return work


def _of_tekken(content: bytes) -> Vocabulary:
    from extproc.tokenizing.byte_pairs import byte_level_tokenizer
    from extproc.tokenizing.tekken_file import read_tekken

    tekken = read_tekken(content)
    first_id = tekken.control_count
    library = byte_level_tokenizer(tekken.ranks, tekken.pattern, {}, first_id)
    _put_first(library, "<s>", tekken.controls)
    return Vocabulary(
        library, version=tekken.version, controls=tekken.controls, settings=tekken.settings
    )


def _of_mistral_pieces(content: bytes, version: str) -> Vocabulary:
    from extproc.tokenizing.sentencepiece_file import read_pieces
    from extproc.tokenizing.sentencepiece_tokenizer import mistral_tokenizer, own_symbols

    pieces = read_pieces(content)
    library = mistral_tokenizer(pieces)
    controls = pieces.controls
    _put_first(library, "<s>", controls)
    symbols = own_symbols(pieces)
    return Vocabulary(
        library,
        refused=None if symbols is None else RefusedCut(symbols, 1),
        version=version.partition("m")[0],
        controls=controls,
    )


def _put_first(library: tokenizers.Tokenizer, name: str, controls: Mapping[str, int]) -> None:
    """Puts a control token before texts that are tokenized with special tokens."""
    if name not in controls:
        raise ValueError(f"it has no {name}")
    library.post_processor = processors.TemplateProcessing(
        single=f"{name} $A", special_tokens=[(name, controls[name])]
    )


def _of_kimi(content: bytes, source: bytes, settings: Mapping[str, Any]) -> Vocabulary:
    from extproc.tokenizing.byte_pairs import byte_level_tokenizer
    from extproc.tokenizing.split_patterns import check_pattern
    from extproc.tokenizing.tiktoken_file import read_ranks

    if not source:
        raise ValueError("there is no tokenization_kimi.py that says how it cuts texts")
    code = read_code(source)
    check_pattern(code.pattern)
    ranks = read_ranks(content)
    special = code.special_tokens(len(ranks), settings.get("added_tokens_decoder"))
    library = byte_level_tokenizer(ranks, code.pattern, special)
    return Vocabulary(library, refused=_CUT_BY_KIMI, kimi=code)


def _of_pieces(content: bytes, settings: Mapping[str, Any]) -> Vocabulary:
    from extproc.tokenizing.sentencepiece_file import read_pieces
    from extproc.tokenizing.sentencepiece_tokenizer import llama_tokenizer

    return Vocabulary(llama_tokenizer(read_pieces(content), settings))


def _of_merges(content: bytes, merges: bytes, settings: Mapping[str, Any]) -> Vocabulary:
    from extproc.tokenizing.merges_file import merges_tokenizer

    return Vocabulary(merges_tokenizer(content, merges, settings))
