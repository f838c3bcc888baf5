"""SentencePiece models: the ids of sentencepiece and of transformers, and what is refused.

`pieces.model` was trained by sentencepiece 0.2.3; `pieces.json` has the ids of some texts by it,
and by transformers 5.19 (LlamaTokenizer).
"""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import RequestError, StartError
from extproc.config.schema import Model
from extproc.requests.prompt import Text
from extproc.tokenizing.sentencepiece_file import BYTES, Kind, Piece, Pieces, read_pieces
from extproc.tokenizing.sentencepiece_tokenizer import llama_tokenizer, mistral_tokenizer
from extproc.tokenizing.tokens import Tokenizer

HERE = Path(__file__).parent
MODEL = (HERE / "pieces.model").read_bytes()
JUDGED = json.loads((HERE / "pieces.json").read_text())
SETTINGS = {
    "tokenizer_class": "LlamaTokenizer",
    "add_bos_token": True,
    "bos_token": "<s>",
    "eos_token": "</s>",
}


def write(directory: Path, name: str, content: bytes = MODEL, **settings: Any) -> Path:
    (directory / name).write_bytes(content)
    (directory / "tokenizer_config.json").write_text(json.dumps({**SETTINGS, **settings}))
    return directory


def load(directory: Path) -> Tokenizer:
    found = Tokenizer.load(Model("m", tokenizer=str(directory)))
    assert found is not None
    return found


def test_ids_are_those_of_transformers(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path, "tokenizer.model"))
    ids = [tokenizer.encode(Text(text)).tolist() for text in JUDGED["texts"]]
    assert ids == JUDGED["transformers"]


def test_ids_are_those_of_sentencepiece_except_for_its_own_symbols(tmp_path: Path) -> None:
    tokenizer = load(write(tmp_path, "tokenizer.model.v3", _with_controls()))
    for text, ids in zip(JUDGED["texts"], JUDGED["sentencepiece"], strict=True):
        if "[REF]" in text:
            with pytest.raises(RequestError, match="tokenizer_failed"):
                tokenizer.encode(Text(text))
        else:
            found = tokenizer.encode(Text(text, add_special_tokens=False)).tolist()
            assert found == ids


# A field of a message: its number and its bytes.
def field(number: int, content: bytes) -> bytes:
    return bytes((number << 3 | 2, len(content))) + content


def piece(text: str, kind: Kind = Kind.NORMAL, score: float = 0.0) -> bytes:
    inner = field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes((0x18, kind))
    return field(1, inner)


def _with_controls() -> bytes:
    names = ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
    more = [piece(name, Kind.CONTROL) for name in (*names, "[TOOL_CALLS]")]
    return MODEL + b"".join(more)


ALL_BYTES = b"".join(piece(one, Kind.BYTE) for one in sorted(BYTES))
TRAINER = field(2, b"\x18\x02\x98\x02\x01")  # model_type 2, byte_fallback


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "no pieces"),
        (b"\x0b", "no SentencePiece model"),
        (b"\xff" * 20, "no SentencePiece model"),
        (MODEL[:-3], "cut off"),
        (piece("a"), "no SentencePiece model that joins pairs"),
        (piece("a") + TRAINER, "each byte"),
        (ALL_BYTES + TRAINER + piece("a") * 2, "the same text"),
        (ALL_BYTES + TRAINER + piece(""), "a piece is empty"),
        (ALL_BYTES + TRAINER + field(1, b"\x0a\x01\xff"), "decode"),
        (ALL_BYTES + TRAINER + field(1, b"\x0a\x01a\x18\x09"), "9 is not a valid"),
        pytest.param(piece("a") * 530_000, "more than 524288 pieces", marks=pytest.mark.slow),
    ],
)
def test_other_models_are_refused(content: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_pieces(content)


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_refused(content: bytes) -> None:
    try:
        read_pieces(content)
    except ValueError:
        return
    pytest.fail("a model of 300 bytes has no piece for each byte")


def test_fields_that_are_not_known_are_skipped() -> None:
    doubles = b"\x21" + b"\0" * 8  # field 4, eight bytes
    plain = field(3, b"\x20\x00")  # remove_extra_whitespaces
    found = read_pieces(
        ALL_BYTES + TRAINER + doubles + piece("a", score=-1.5) + plain + b"\x30\x01"
    )
    assert found.is_plain
    assert found.pieces[-1] == Piece("a", -1.5, Kind.NORMAL)


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        (Pieces([Piece("a", 0.0, Kind.NORMAL)], is_plain=False), "changes texts"),
        (Pieces([Piece("a", 0.0, Kind.UNUSED)], is_plain=True), "unused pieces"),
    ],
)
def test_models_that_sentencepiece_uses_otherwise_are_refused(pieces: Pieces, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        mistral_tokenizer(pieces)


def test_settings_decide_what_is_put_around_texts(tmp_path: Path) -> None:
    both = load(write(tmp_path, "tokenizer.model", add_eos_token=True, add_prefix_space=False))
    assert both.encode(Text("a")).tolist()[::2] == [1, 2]
    pieces = read_pieces(MODEL)
    legacy = llama_tokenizer(pieces, {"legacy": True})
    assert legacy.encode("a</s>a").ids.count(legacy.encode("a").ids[-1]) == 2
    with pytest.raises(StartError, match="class of tokenizer is not known"):
        load(write(tmp_path, "tokenizer.model", tokenizer_class="T5Tokenizer"))


def test_vocabulary_of_mistrals_needs_its_first_token(tmp_path: Path) -> None:
    content = ALL_BYTES + TRAINER + field(3, b"\x20\x00") + piece("a")
    with pytest.raises(StartError, match="it has no <s>"):
        load(write(tmp_path, "tokenizer.model.v3", content))
