"""Vocabularies without tokenizer.json: what they become, and which are refused, by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from extproc.base.errors import RequestError, StartError
from extproc.base.tokenizer_files import TokenizerFiles
from extproc.config.schema import Model
from extproc.requests.prompt import Text
from extproc.tokenizing.byte_pairs import (
    MAX_TOKEN_BYTES,
    byte_level_tokenizer,
    check_ranks,
    merges,
    printed,
)
from extproc.tokenizing.split_patterns import KIMI, TEKKEN
from extproc.tokenizing.tekken_file import read_tekken
from extproc.tokenizing.tiktoken_file import read_ranks
from extproc.tokenizing.tokens import Tokenizer
from tests.extproc.small_models import KIMI_CODE, RANKS, kimi_settings, tekken, write_model

BYTES = {bytes((byte,)): byte for byte in range(256)}
SMALL = read_ranks(RANKS.encode())


def joined(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """The ids of one piece as tiktoken finds them, by its definition."""
    if piece in ranks:
        return [ranks[piece]]
    parts = [piece[place : place + 1] for place in range(len(piece))]
    while True:
        pairs = [
            (ranks[parts[at] + parts[at + 1]], at)
            for at in range(len(parts) - 1)
            if parts[at] + parts[at + 1] in ranks
        ]
        if not pairs:
            return [ranks[part] for part in parts]
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@st.composite
def trained(draw: st.DrawFn) -> dict[bytes, int]:
    """Ranks as training makes them: each joins two tokens that are there."""
    ranks = dict(BYTES)
    tokens = [b"a", b"b", b"c"]
    for _ in range(draw(st.integers(0, 25))):
        left, right = draw(st.sampled_from(tokens)), draw(st.sampled_from(tokens))
        if left + right not in ranks and len(left + right) < 12:
            ranks[left + right] = len(ranks)
            tokens.append(left + right)
    return ranks


@given(trained(), st.lists(st.text("abc", min_size=1, max_size=40), max_size=5))
def test_ids_are_those_of_tiktokens_definition(ranks: dict[bytes, int], words: list[str]) -> None:
    tokenizer = byte_level_tokenizer(ranks, r"\S+|\s+", {})
    for word in words:
        assert tokenizer.encode(word).ids == joined(word.encode(), ranks)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.sampled_from([KIMI, TEKKEN]))
def test_pieces_of_any_text_are_joined_alike(text: str, pattern: str) -> None:
    cut = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    pieces = [piece for piece, _ in cut.pre_tokenize_str(text)]
    expected = [one for piece in pieces for one in joined(piece.encode(), SMALL)]
    assert "".join(pieces) == text
    assert byte_level_tokenizer(SMALL, pattern, {}, 7).encode(text).ids == [
        one + 7 for one in expected
    ]


@pytest.mark.parametrize(
    ("before", "after"), [(("ab", "a"), ("a", "ba")), (("ab", "aba"), ("aba", "ba"))]
)
def test_left_one_of_two_cuts_that_overlap_is_joined_first(
    before: tuple[str, str], after: tuple[str, str]
) -> None:
    ranks = {part: rank for rank, part in enumerate(["a", "b", "ab", "ba", "aba", "ababa"])}
    found = list(merges(ranks))
    assert found.index(before) < found.index(after)


@pytest.mark.parametrize(
    ("ranks", "reason"),
    [
        ({b"a": 0}, "not every single byte"),
        ({**BYTES, b"": 300}, "not every single byte"),
        ({**BYTES, b"ab": 1}, "same rank"),
        ({**BYTES, b"a" * (MAX_TOKEN_BYTES + 1): 300}, "more than 1024 bytes"),
    ],
)
def test_ranks_of_another_kind_are_refused(ranks: dict[bytes, int], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_ranks(ranks)


def test_vocabulary_has_a_limit_of_tokens_and_bytes() -> None:
    many = {**BYTES, **{b"%6d" % one: one for one in range(256, 530_000)}}
    with pytest.raises(ValueError, match="more than 524288 tokens"):
        check_ranks(many)
    long = {**BYTES, **{b"%1000d" % one: one for one in range(256, 9_000)}}
    with pytest.raises(ValueError, match="bytes in all"):
        check_ranks(long)
    with pytest.raises(ValueError, match="as well"):
        byte_level_tokenizer(BYTES, KIMI, {"a": 256})


def test_tokens_that_are_made_of_others_in_too_many_ways_are_refused() -> None:
    runs = {b"a" * times: times for times in range(1, 501)}
    few = {run: rank for run, rank in runs.items() if rank <= 300}
    assert sum(1 for _ in merges(few)) == sum(range(300))
    with pytest.raises(ValueError, match="too many ways"):
        list(merges(runs))


@pytest.mark.parametrize(
    "line", [b"YQ==", b"YQ== x", b"YQ== -1", b"Y 1", b"YQ== 1 2", b"YQ== 9999999999", b"!!!! 1"]
)
def test_line_that_is_no_token_with_its_rank_is_refused_by_number(line: bytes) -> None:
    with pytest.raises(ValueError, match="line 3"):
        read_ranks(b"YWE= 0\n\n" + line)
    with pytest.raises(ValueError, match="line 2"):
        read_ranks(b"YQ== 0\nYQ== 1")


def test_file_of_lines_without_end_is_refused_before_it_is_cut_into_them() -> None:
    with pytest.raises(ValueError, match="more than 524288 tokens"):
        read_ranks(b"ab\n" * 1_048_578)


Change = Callable[[dict[str, Any]], None]


def change(**fields: Any) -> Change:
    """Changes fields of a tekken.json, those of its config by `config_` before their names."""

    def work(content: dict[str, Any]) -> None:
        for name, value in fields.items():
            if name.startswith("config_"):
                content["config"][name.removeprefix("config_")] = value
            else:
                content[name] = value

    return work


TWICE = [{"rank": 0, "token_str": "<s>"}, {"rank": 1, "token_str": "<s>"}]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (change(vocab=5), "no tekken.json"),
        (change(vocab=[{"rank": 0}] * 1_100_000), "more than 524288 tokens"),
        (change(model_settings_builder={"a": "b" * 70_000}), "more than 65536 bytes"),
        (change(model_settings_builder=[]), "no object"),
        (change(config_pattern="(a+)+$"), "pattern that is not known"),
        (change(config_default_vocab_size=1 << 40), "sizes of its vocabulary"),
        (change(config_default_vocab_size=1), "sizes of its vocabulary"),
        (change(special_tokens=None), "lists no control tokens"),
        (change(special_tokens=TWICE), "the same text"),
        (change(special_tokens=[{"rank": 99, "token_str": "<s>"}]), "numbers of its control"),
        (change(vocab=[{"rank": 0, "token_bytes": "??"}] * 1200), "token 0 is no base64"),
        (change(vocab=[{"rank": 0, "token_bytes": "YQ=="}] * 1200), "token 0 has another rank"),
    ],
)
def test_broken_tekken_is_refused(changed: Change, reason: str) -> None:
    content = tekken("v13")
    changed(content)
    with pytest.raises(ValueError, match=reason):
        read_tekken(json.dumps(content).encode())


def test_text_never_becomes_a_control_token_of_mistral(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(Model("m", tokenizer=str(write_model("mistral-v13", tmp_path))))
    assert tokenizer is not None
    ids = tokenizer.encode(Text("<s>[INST]x[/INST]"))
    assert ids[0] == 1
    assert all(one >= 40 for one in ids[1:])
    assert tokenizer.text_of(ids[1:]) == "<s>[INST]x[/INST]"


def load(directory: Path, **options: Any) -> Tokenizer:
    found = Tokenizer.load(Model("m", tokenizer=str(directory), **options))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("tokenization_kimi.py", "", "no tokenization_kimi.py"),
        ("tokenization_kimi.py", "import os; os.system('true')", "not the one that is known"),
        ("tokenization_kimi.py", KIMI_CODE.replace("p{Han}", "p{Thai}"), "not known here"),
        ("tiktoken.model", "YQ 0", "line 1 is no token"),
        (
            "tokenizer_config.json",
            json.dumps({"added_tokens_decoder": {"7": {"content": "x"}}}),
            "o",
        ),
    ],
)
def test_kimi_that_cannot_be_converted_is_refused_with_a_remedy(
    file: str, content: str, reason: str, tmp_path: Path
) -> None:
    (write_model("kimi-k2", tmp_path) / file).write_text(content)
    with pytest.raises(StartError, match=rf"{reason}.*remote: true"):
        load(tmp_path)


@pytest.mark.parametrize("text", ["x" * 25_001, " " * 25_001, "ab " * 133_334])
def test_text_that_kimis_code_cuts_before_is_refused(text: str, tmp_path: Path) -> None:
    tokenizer = load(write_model("kimi-k2", tmp_path))
    with pytest.raises(RequestError, match="tokenizer_failed"):
        tokenizer.encode(Text(text))
    assert len(tokenizer.encode(Text(text[:25_000])))


def test_reserved_tokens_of_kimi_are_found_in_texts(tmp_path: Path) -> None:
    (write_model("kimi-k2", tmp_path) / "tokenizer_config.json").write_text(
        json.dumps(kimi_settings())
    )
    assert load(tmp_path).encode(Text("<|reserved_token_1457|>a"))[0] == 1457


@pytest.mark.parametrize(
    ("files", "mode", "chosen"),
    [
        (["tokenizer.json"], "auto", "tokenizer.json"),
        (["tokenizer.json", "tekken.json"], "auto", "tekken.json"),
        (["tokenizer.json", "tekken.json", "model-1.safetensors"], "auto", "tokenizer.json"),
        (["tokenizer.json", "tekken.json", "consolidated.safetensors"], "auto", "tekken.json"),
        (["tokenizer.json", "tekken.json", "consolidated.safetensors"], "hf", "tokenizer.json"),
        (["tokenizer.json", "tekken.json", "model.safetensors"], "mistral", "tekken.json"),
        (["tokenizer.model.v3", "tokenizer.model.v7"], "auto", "tokenizer.model.v7"),
        (["tokenizer.model", "vocab.json"], "auto", "tokenizer.model"),
    ],
)
def test_vocabulary_is_chosen_as_the_engine_does(
    files: list[str], mode: str, chosen: str, tmp_path: Path
) -> None:
    for name in files:
        (tmp_path / name).write_text("")
    assert TokenizerFiles.find(str(tmp_path)).chosen(mode).name == chosen


def test_mistrals_mode_needs_its_files(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("")
    with pytest.raises(ValueError, match="no tekken"):
        TokenizerFiles.find(str(tmp_path)).chosen("mistral")


GPT2 = {
    "vocab.json": json.dumps({printed(bytes((byte,))): byte for byte in range(256)} | {"ab": 256}),
    "merges.txt": "#version: 0.2\na b\n",
    "tokenizer_config.json": json.dumps(
        {
            "tokenizer_class": "Qwen2Tokenizer",
            "added_tokens_decoder": {"257": {"content": "<|x|>", "special": True}},
        }
    ),
}


def write(directory: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (directory / name).write_text(content)
    return directory


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "GPT2TokenizerFast"])
def test_merges_make_a_tokenizer(name: str, tmp_path: Path) -> None:
    settings = {**json.loads(GPT2["tokenizer_config.json"]), "tokenizer_class": name}
    files = {**GPT2, "tokenizer_config.json": json.dumps(settings)}
    ids = load(write(tmp_path, files)).encode(Text("ab<|x|>c")).tolist()
    assert ids == [256, 257, ord("c")]


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("tokenizer_config.json", "{}", "class of tokenizer is not known"),
        ("vocab.json", "[]", "no vocab.json"),
        ("vocab.json", '{"a": 1, "b": 1}', "two with the same id"),
        ("merges.txt", "a b\nx\n", "line 2 of merges.txt"),
        ("merges.txt", "a c", "line 1 of merges.txt"),
        ("merges.txt", "\n" * 1_048_578, "too many lines"),
        ("vocab.json", '{"":0,' * 1_048_578, "too many tokens"),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "GPT2Tokenizer", "added_tokens_decoder": {"9": {"content": "y"}}}',
            "other ids",
        ),
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": {"9": 1}}',
            "another form",
        ),
    ],
)
def test_broken_merges_are_refused(file: str, content: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(StartError, match=reason):
        load(write(tmp_path, {**GPT2, file: content}))


def test_ten_gigabytes_are_refused_by_name(tmp_path: Path) -> None:
    with (tmp_path / "tekken.json").open("wb") as file:
        file.truncate(10 << 30)
    with pytest.raises(StartError, match=r"/tekken.json is larger than"):
        load(tmp_path)


def test_fillers_of_a_vocabulary_are_no_tokens_of_texts() -> None:
    tokenizer = byte_level_tokenizer(BYTES, KIMI, {}, 3)
    assert isinstance(tokenizer.model, models.BPE)
    assert tokenizer.encode(" 1 2").ids == [one + 3 for one in b" 1 2"]
