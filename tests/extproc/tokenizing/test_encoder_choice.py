import functools
import itertools
import json
import logging
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors

from extproc.tokenizing.encoder_choice import EncoderChoice, choose, framed_ids, in_parts, probes
from extproc.tokenizing.tokenizer_layout import Cutter, cut_everywhere, read
from kvstate.overlap import Tokens
from tests.extproc.tokenizer_kinds import CHAT, KINDS, PIECES, tokenizer_of

WORDS = st.sampled_from(
    [
        "The",
        "quick",
        "fox",
        "LAZY",
        "naïve",
        "快速",
        "1234",
        "it's",
        "👍",
        "e\u0301",
        "b>",
        "<",
        "▁",
    ]
)
SPACES = st.sampled_from([" ", "  ", "\n", "\n\n", "\t", "\u00a0"])
PARTS = st.lists(
    st.one_of(st.sampled_from(PIECES), WORDS, SPACES, st.text(max_size=4)), max_size=24
)
TEXTS = PARTS.map("".join)


def whole(tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False) -> Tokens:
    return array("I", tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)


def ids_of(choice: EncoderChoice, text: str) -> Tokens:
    return choice.texts.finish(choice.texts.begin(text)).ids


def chosen(tokenizer: Tokenizer, **options: Any) -> EncoderChoice:
    """The choice for a tokenizer; its proofs have time on a machine as busy as can be."""
    return choose(tokenizer, "m", **{"max_known_bytes": 1 << 20, "proof_seconds": 600, **options})


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
@example(text="The<a><b><c>fox")
def test_in_parts_gives_the_ids_of_the_whole(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    encode = in_parts(
        lambda part: whole(tokenizer, part),
        Cutter(read(tokenizer.to_str()).added_tokens, cut_everywhere),
    )
    assert encode(text) == whole(tokenizer, text)


@pytest.mark.parametrize("kind", KINDS)
@given(turns=st.lists(st.tuples(st.integers(0, 400), TEXTS), max_size=6))
@pytest.mark.slow
def test_continued_or_changed_conversations_have_exact_ids(
    kind: str, turns: list[tuple[int, str]]
) -> None:
    choice = choice_of(kind)
    text = "<|im_start|>user\nThe quick brown fox<|im_end|>\n" * 12
    for keep, more in turns:
        text = text[: len(text) - keep] + more
        assert ids_of(choice, text) == whole(tokenizer_of(kind), text)


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXTS)
def test_framed_ids_equal_those_of_the_library(kind: str, text: str) -> None:
    choice = choice_of(kind)
    assert choice.frame is not None
    framed = framed_ids(ids_of(choice, text), choice.frame)
    assert framed == whole(tokenizer_of(kind), text, add_special_tokens=True)


@pytest.mark.parametrize("kind", KINDS)
def test_cutter_serves_every_kind_of_tokenizer(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    chosen(tokenizer_of(kind))
    assert "not used" not in caplog.text
    expected = (
        len(CHAT) + 1 + ("awkward" in kind)
    )  # <unk>; and <right>, which absorbs no space before it
    assert f"cut at {expected} special tokens" in caplog.text


class Library:
    """Stands for fastokens: `tokenizers` underneath, but wrong for texts with `wrong` in them."""

    def __init__(self, wrong: str = "", *, fails: bool = False) -> None:
        self._wrong = wrong
        self._fails = fails
        self.Tokenizer = self

    def from_json_str(self, source: str) -> "Library":
        if self._fails:
            raise ValueError("unsupported")
        self._inner = Tokenizer.from_str(source)
        return self

    def encode_batch_flat(
        self, texts: Sequence[str], *, add_special_tokens: bool
    ) -> tuple[bytes, bytes]:
        ids = self._inner.encode(texts[0], add_special_tokens=add_special_tokens).ids
        if self._wrong and self._wrong in texts[0]:
            ids = ids[1:]
        return array("I", ids).tobytes(), b""


@pytest.fixture
def fastokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Library], None]:
    """Puts a library in place of fastokens."""

    def install(library: Library) -> None:
        monkeypatch.setitem(sys.modules, "fastokens", cast("ModuleType", library))
        about = tmp_path / "fastokens-9.dist-info"
        about.mkdir(exist_ok=True)
        (about / "METADATA").write_text("Name: fastokens\nVersion: 9\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def logged(caplog: pytest.LogCaptureFixture, tokenizer: Tokenizer, **options: Any) -> str:
    caplog.set_level(logging.INFO, "kvsteer.tokens")
    chosen(tokenizer, **options)
    return caplog.text


def test_fastokens_is_used_if_its_ids_are_equal(
    fastokens: Callable[[Library], None], caplog: pytest.LogCaptureFixture
) -> None:
    fastokens(Library())
    assert "tokenized by fastokens 9, cut at 7" in logged(caplog, tokenizer_of("Llama 3"))


def test_fastokens_that_differs_is_named_by_probe_and_not_used(
    fastokens: Callable[[Library], None], caplog: pytest.LogCaptureFixture
) -> None:
    fastokens(Library(wrong="kebab-case"))
    text = logged(caplog, tokenizer_of("Llama 3"))
    assert f"model m: fastokens 9: probe {index_of('kebab-case')} differs; not used" in text
    assert "kebab" not in text
    assert "tokenized by tokenizers" in text


def test_fastokens_that_cannot_load_the_tokenizer_is_not_used(
    fastokens: Callable[[Library], None], caplog: pytest.LogCaptureFixture
) -> None:
    fastokens(Library(fails=True))
    text = logged(caplog, tokenizer_of("Llama 3"))
    assert "model m: fastokens does not support this tokenizer" in text
    assert "tokenized by tokenizers" in text


def test_tokenizers_is_used_without_fastokens(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "fastokens", None)
    assert "tokenized by tokenizers" in logged(caplog, tokenizer_of("Llama 3"))


@given(step=st.integers(1, 200))
def test_choice_uses_only_encoders_proved_in_time(step: int) -> None:
    tokenizer = tokenizer_of("Llama 3")
    passing = itertools.count(step=step)
    choice = chosen(tokenizer, clock=lambda: next(passing), proof_seconds=1000)
    is_proved = step * len(probes(read(tokenizer.to_str()).added_tokens)) < 1000
    assert (choice.frame is not None) == is_proved
    found = choice.texts.finish(choice.texts.begin("The</s>fox"))
    assert (found.lasting > 0) == is_proved  # it lasts up to a cut


def test_proof_that_runs_out_of_time_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    passing = itertools.count(step=0.2)
    text = logged(caplog, tokenizer_of("Llama 3"), clock=lambda: next(passing), proof_seconds=0.5)
    assert "model m: cut text: not compared in time: 2 of " in text
    assert "cut at 0 special tokens" in text


def test_random_tokenizer_is_not_cut(caplog: pytest.LogCaptureFixture) -> None:
    content = json.loads(tokenizer_of("Llama 3").to_str())
    content["model"]["dropout"] = 0.5
    tokenizer = Tokenizer.from_str(json.dumps(content))
    assert "cut at 0 special tokens" in logged(caplog, tokenizer)


def test_unreadable_frame_leaves_the_whole_text_to_the_library() -> None:
    tokenizer = Tokenizer.from_str(tokenizer_of("Llama 3").to_str())
    bos = [("<s>", tokenizer.token_to_id("<s>"))]
    twice = processors.TemplateProcessing(single="<s> $A", special_tokens=bos)
    tokenizer.post_processor = processors.Sequence([twice, twice])
    choice = chosen(tokenizer)
    assert choice.frame is None
    assert choice.encode_whole("The fox") == whole(tokenizer, "The fox", add_special_tokens=True)


def index_of(text: str) -> int:
    added = read(tokenizer_of("Llama 3").to_str()).added_tokens
    return next(index for index, one in enumerate(probes(added)) if text in one)


@functools.cache
def choice_of(kind: str) -> EncoderChoice:
    return chosen(tokenizer_of(kind))
