"""Tokenizers of every class and cut, as the transformers that is installed loads them."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.schema import Model
from extproc.proof.golden import CUT_TEXT
from extproc.requests.prompt import Text
from extproc.tokenizing.tokens import Tokenizer
from tests.extproc.tokenizing.test_tokenizer_classes import (
    CLASSES,
    FILES,
    FIRST,
    MARKED,
    WHOLE,
    file_of,
)


def pieces(file: str) -> list[str]:
    """Returns the golden text as a tokenizer normalizes and cuts it."""
    library = tokenizers.Tokenizer.from_str(file)
    text = library.normalizer.normalize_str(CUT_TEXT) if library.normalizer else CUT_TEXT
    cut = library.pre_tokenizer
    return [piece for piece, _ in cut.pre_tokenize_str(text)] if cut else [text]


def test_golden_text_is_cut_in_another_way_by_every_class() -> None:
    files = [
        *FILES.values(),
        (MARKED, None),
        (None, FIRST),
        (None, {**WHOLE, "add_prefix_space": True}),
    ]
    cuts = [tuple(pieces(file_of(*one))) for one in files]
    assert all(one != other for one, other in itertools.combinations(cuts, 2))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return iter(tmp_path_factory.mktemp("classes") / str(number) for number in itertools.count())


KINDS = ("llama", "qwen2", "qwen3", "qwen3_5", "deepseek_v3", "gemma3_text", "cohere2", "glm4")
NAMES = (*CLASSES.values(), "LlamaTokenizerFast", "GemmaTokenizer", "PreTrainedTokenizerFast", None)


@given(
    file=st.sampled_from(list(FILES)),
    name=st.sampled_from(NAMES),
    kind=st.sampled_from(KINDS),
    text=st.text(st.sampled_from(CUT_TEXT), max_size=40),
)
def test_ids_that_are_in_no_doubt_are_those_of_the_library(
    directories: Iterator[Path], file: str, name: str | None, kind: str, text: str
) -> None:
    from transformers import AutoTokenizer  # a second, which collecting tests need not take

    directory = next(directories)
    directory.mkdir()
    settings = {} if name is None else {"tokenizer_class": name}
    (directory / "tokenizer.json").write_text(file_of(*FILES[file]))
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({"model_type": kind}))
    ours = Tokenizer.load(Model("m", tokenizer=str(directory)))
    assert ours is not None
    started = ours.start(Text(text, add_special_tokens=False))
    if not started.forms:
        library = AutoTokenizer.from_pretrained(str(directory))
        assert started.finish().tolist() == library.encode(text, add_special_tokens=False)
