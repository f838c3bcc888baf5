import threading
import time
from typing import cast

import pytest
from tokenizers import Tokenizer, models

from extproc.base.errors import RequestError
from extproc.tokenizing.encoder_choice import FastEncoder, PlainEncoder
from tests.extproc.tokenizer_kinds import tokenizer_of

MISSING = "missing"
TEXTS = ["The quick fox", "", "<s>naïve 快速"]


def test_ids_are_buffers_without_added_special_tokens() -> None:
    tokenizer = tokenizer_of("Llama 3")
    found = PlainEncoder(tokenizer).ids(TEXTS)
    assert [one.typecode for one in found] == ["I", "I", "I"]
    expected = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    assert [one.tolist() for one in found] == expected


def test_fast_encoder_gives_the_same_buffers() -> None:
    pytest.importorskip("fastokens", reason="the extra `fast` is not installed")
    tokenizer = tokenizer_of("Llama 3")
    assert FastEncoder(tokenizer.to_str()).ids(TEXTS) == PlainEncoder(tokenizer).ids(TEXTS)


def test_encoder_failure_is_named_without_the_words_of_the_library() -> None:
    encoder = PlainEncoder(Tokenizer(models.WordLevel({"a": 0}, MISSING)))
    with pytest.raises(RequestError, match=r"^tokenizer_failed$") as raised:
        encoder.ids(["a secret"])
    assert raised.value.__suppress_context__


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(RequestError, match="not_unicode"):
        PlainEncoder(tokenizer_of("Llama 3")).ids(["fine", "\ud800"])


def test_framed_ids_equal_those_of_the_library() -> None:
    tokenizer = tokenizer_of("Llama 3")
    assert PlainEncoder(tokenizer).framed_ids("The fox").tolist() == tokenizer.encode("The fox").ids
    with pytest.raises(RequestError, match="too_many_new_characters"):
        PlainEncoder(tokenizer).framed_ids("a" * (PlainEncoder.max_characters + 1))


def test_interrupt_is_no_encoder_failure() -> None:
    class Interrupted:
        def encode_batch_fast(self, *_: object, **__: object) -> None:
            raise KeyboardInterrupt

    encoder = PlainEncoder(cast("Tokenizer", Interrupted()))
    with pytest.raises(KeyboardInterrupt):
        encoder.ids(["a"])


def test_ids_of_a_long_text_let_other_threads_run() -> None:
    encoder = PlainEncoder(tokenizer_of("Llama 3"))
    worker = threading.Thread(target=encoder.ids, args=[["The quick brown fox " * 20_000]])
    turns = 0
    worker.start()
    while worker.is_alive():
        turns += 1
        time.sleep(0)
    assert turns > 100
