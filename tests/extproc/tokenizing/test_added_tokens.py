"""The added tokens of a tokenizer, from all files of its directory, are those of transformers."""

import functools
import itertools
import json
import logging
import os
import random
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import RequestError, StartError
from extproc.config.schema import Model
from extproc.requests.prompt import CUT, Chat, Text
from extproc.tokenizing.added_tokens import (
    LoadedTokens,
    ModelIds,
    TokenFiles,
    are_alike,
    loaded_in_all_ways,
)
from extproc.tokenizing.tokenizer_classes import classes_of
from extproc.tokenizing.tokenizer_layout import AddedToken
from extproc.tokenizing.tokens import Tokenizer
from kvtools.simulator.settings import TINY_MODEL
from tests.extproc.tokenizing.library_loading import loaded
from tests.extproc.tokenizing.token_directories import (
    ASKED,
    RECORDED,
    VOCABULARY,
    Files,
    files_by_chance,
    loaded_by,
    write,
    written,
)

MODEL = ModelIds(VOCABULARY.get, len(VOCABULARY))


def loads(directory: Path) -> Tokenizer:
    tokenizer = Tokenizer.load(Model("m", tokenizer=str(directory)))
    assert tokenizer is not None
    return tokenizer


def assert_as_loaded(directory: Path, releases: Iterable[Mapping[str, Any]]) -> None:
    """Checks that ids without a doubt are those of each release that loads the directory."""
    expected = [one for one in releases if "error" not in one]
    try:
        tokenizer = loads(directory)
    except StartError:
        assert not expected
        return
    started = tokenizer.start(Text(ASKED, add_special_tokens=False))
    if not started.forms:
        assert [started.finish().tolist()] * len(expected) == [one["ids"] for one in expected]


@functools.cache
def recorded() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(RECORDED.read_text())
    return rows


@pytest.mark.parametrize("number", range(100))
def test_tokens_in_no_doubt_are_those_of_both_releases(tmp_path: Path, number: int) -> None:
    row = recorded()[number]
    write(tmp_path / "m", row["files"])
    assert_as_loaded(tmp_path / "m", row["loaded"])


def ways_of(files: Files) -> list[LoadedTokens]:
    settings = files["tokenizer_config.json"]
    special_map, listed = files.get("special_tokens_map.json"), files.get("added_tokens.json")
    layout = [AddedToken(number, **token) for number, token in layout_of(files["tokenizer.json"])]
    sources = TokenFiles(settings, special_map, listed, layout)
    return loaded_in_all_ways(sources, MODEL, *classes_of(settings, files["config.json"]))


def layout_of(tokens: list[dict[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """The tokens of a file as the library numbers them."""
    new = itertools.count(len(VOCABULARY))
    numbered = [(VOCABULARY.get(one["content"]), one) for one in tokens]
    found = [(next(new) if number is None else number, one) for number, one in numbered]
    yield from sorted(found, key=lambda pair: pair[0])


def table_of(one: LoadedTokens) -> tuple[Any, Any]:
    flags = ("id", "content", "single_word", "lstrip", "rstrip", "normalized", "special")
    added = [[getattr(token, flag) for flag in flags] for token in one.added.values()]
    return sorted(added), {name: text for name, text in one.named.items() if text}


@pytest.mark.parametrize("release", [0, 1])
def test_each_releases_set_of_tokens_is_one_of_the_ways(release: int) -> None:
    compared = 0
    for row in recorded():
        theirs = row["loaded"][release]
        try:
            ways = [table_of(one) for one in ways_of(row["files"])]
        except ValueError:
            assert "error" in theirs
            continue
        if "error" not in theirs:
            compared += 1
            assert (theirs["added"], theirs["named"]) in ways or is_of_another_class(row["files"])
    assert compared > 40


def is_of_another_class(files: Files) -> bool:
    """Whether a release may take the class that is registered for the type, unknown here."""
    return classes_of(files["tokenizer_config.json"], files["config.json"])[0] is None


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    return iter(tmp_path_factory.mktemp("tokens") / str(number) for number in itertools.count())


@given(seed=st.integers(0, 2**32))
def test_tokens_in_no_doubt_are_those_of_the_installed_library(
    directories: Iterator[Path], seed: int
) -> None:
    directory = next(directories)
    write(directory, files_by_chance(random.Random(seed)))
    assert_as_loaded(directory, [loaded(str(directory), ASKED)])


PYTHONS = [one for one in os.environ.get("KVSTEER_TRANSFORMERS_PYTHONS", "").split(":") if one]


@pytest.mark.slow
@pytest.mark.skipif(not PYTHONS, reason="KVSTEER_TRANSFORMERS_PYTHONS names no Pythons")
def test_tokens_in_no_doubt_are_those_of_other_releases(tmp_path: Path) -> None:
    chances = random.Random()
    made = written(tmp_path, (files_by_chance(chances) for _ in range(400)))
    found = [loaded_by(python, made) for python in PYTHONS]
    for directory, *releases in zip(made, *found, strict=True):
        assert_as_loaded(directory, releases)


def directory_with(tmp_path: Path, **files: Any) -> Path:
    """A directory of a kept tokenizer; names of files without ".json"."""
    usual: Files = {
        "tokenizer.json": [],
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "config.json": {},
    }
    write(tmp_path / "m", usual | {f"{name}.json": value for name, value in files.items()})
    return tmp_path / "m"


def ids_of(directory: Path, text: str) -> list[int]:
    return loads(directory).encode(Text(text, add_special_tokens=False)).tolist()


def test_listed_tokens_get_the_next_ids(tmp_path: Path) -> None:
    directory = directory_with(tmp_path, added_tokens={"<x>": 40, "<y>": 41})
    assert ids_of(directory, "a<y><x>") == [0, 9, 8]


def test_flags_of_the_settings_win(tmp_path: Path) -> None:
    token = {"content": "<x>", "special": True, "normalized": False}
    settings = {"added_tokens_decoder": {"8": {**token, "rstrip": True}}}
    plain = {**dict.fromkeys(("single_word", "lstrip", "rstrip"), False), **token}
    directory = directory_with(tmp_path, tokenizer=[plain], tokenizer_config=settings)
    assert ids_of(directory, "a<x> \n a") == [0, 8, 0]


def test_special_token_of_the_map_alone_reaches_templates(tmp_path: Path) -> None:
    directory = directory_with(tmp_path, special_tokens_map={"bos_token": "<s>"})
    (directory / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
    chat = Chat([{"role": "user", "content": "a"}], {})
    assert loads(directory).encode(chat).tolist() == [8, 0]


@pytest.mark.parametrize("template", ["{{ image_token }}", "{{ messages[0].content }}"])
def test_token_that_one_release_alone_names_is_a_doubt_if_it_is_seen(
    tmp_path: Path, template: str
) -> None:
    token = {**dict.fromkeys(("single_word", "lstrip", "rstrip"), False), "content": "<i>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "image_token": "<i>"}
    plain = {**token, "special": True, "normalized": False}
    directory = directory_with(tmp_path, tokenizer=[plain], tokenizer_config=settings)
    (directory / "chat_template.jinja").write_text(template)
    assert (loads(directory).text_forms == CUT) is ("image" in template)


def test_special_tokens_that_are_cut_like_words_are_a_doubt(tmp_path: Path) -> None:
    settings = {"split_special_tokens": True, "eos_token": "<|endoftext|>"}
    directory = directory_with(tmp_path, tokenizer_config=settings)
    assert loads(directory).text_forms & CUT
    assert 7 not in ids_of(directory, "<|endoftext|>")


def test_text_listed_twice_with_other_flags_is_a_doubt() -> None:
    twice = {"1": {"content": "<x>", "rstrip": True}, "2": {"content": "<x>"}}
    files = TokenFiles({"added_tokens_decoder": twice}, None, None, [])
    ways = loaded_in_all_ways(files, MODEL, "PreTrainedTokenizer", None)
    assert not are_alike(ways, splits_special=False, reads=lambda _: True)


def ways_in_5(special_map: Mapping[str, Any], **settings: Any) -> list[LoadedTokens]:
    files = TokenFiles(settings, special_map, None, [])
    return loaded_in_all_ways(files, MODEL, "TokenizersBackend", None)


def test_tokens_of_a_models_own_names_are_added_by_release_5() -> None:
    own = {"model_specific_special_tokens": {"image_token": "<i>"}}
    kept, _ = ways_in_5({}, **own)
    assert (kept.named, [*kept.added]) == ({"image_token": "<i>"}, ["<i>"])


def test_map_whose_tokens_say_that_they_are_special_is_not_loaded_by_release_5() -> None:
    token = {"content": "<x>", "special": True}
    with pytest.raises(ValueError, match="extra_special_tokens says what is special"):
        ways_in_5({"extra_special_tokens": [token]})


def test_text_in_place_of_a_list_is_not_loaded() -> None:
    with pytest.raises(ValueError, match="extra_special_tokens is no list"):
        ways_in_5({}, extra_special_tokens="<x>")


def test_fast_encoder_has_the_tokens_of_all_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("fastokens", reason="needs fastokens (extra `fast`)")
    caplog.set_level(logging.INFO, "kvsteer.tokens")
    shutil.copytree(TINY_MODEL, tmp_path / "m")
    (tmp_path / "m" / "added_tokens.json").write_text('{"<tool_call>": 8192}')
    assert 8192 in ids_of(tmp_path / "m", "call <tool_call> it")
    assert "tokenized by fastokens" in caplog.text


def test_random_tokenizer_keys_no_text(tmp_path: Path) -> None:
    directory = directory_with(tmp_path)
    file = directory / "tokenizer.json"
    source = json.loads(file.read_text())
    source["model"]["dropout"] = 0.1
    file.write_text(json.dumps(source))
    with pytest.raises(RequestError, match="random_tokenizer"):
        ids_of(directory, "a")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("added_tokens.json", "{", "added_tokens.json: no JSON: "),
        ("special_tokens_map.json", "[]", "special_tokens_map.json: not a JSON object"),
        ("tokenizer_config.json", "[" * 100_000, "tokenizer_config.json: nested too deeply"),
        ("config.json", '"\xff"', "config.json: no JSON: "),
        ("added_tokens.json", '{"<x>": "1"}', "an added token whose id is no number"),
        ("tokenizer_config.json", '{"bos_token": 5}', "bos_token is neither a text nor a token"),
        ("tokenizer_config.json", '{"added_tokens_decoder": []}', "is no object"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"x": {}}}', "id is no number"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"1": {"content": "x", "lstrip": 1}}}',
            "an added token whose text or flags are of another type",
        ),
        (
            "tokenizer_config.json",
            json.dumps({"bos_token": "x" * 1025}),
            "an added token of more than 1024 characters",
        ),
        (
            "added_tokens.json",
            json.dumps({f"<{number}>": number for number in range(131_073)}),
            "more than 131072 added tokens",
        ),
    ],
)
def test_damaged_file_is_a_fault_that_says_what_is_wrong(
    tmp_path: Path, name: str, content: str, message: str
) -> None:
    directory = directory_with(tmp_path)
    (directory / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(StartError, match=message):
        loads(directory)
