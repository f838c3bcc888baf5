import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from extproc.config import Model, RemoteTokenizer
from extproc.errors import RequestError, StartError
from extproc.request import CHAT_PATH, COMPLETIONS_PATH, Chat, Text, parse
from extproc.tokenizer_files import TokenizerFiles
from extproc.tokens import Tokenizer
from simulator.settings import TINY_MODEL

RECORDINGS = sorted((Path(__file__).parent.parent / "wire").glob("vllm_0.32.0_*.jsonl"))


def load(**fields: Any) -> Tokenizer:
    tokenizer = Tokenizer.load(Model("tiny", tokenizer=str(TINY_MODEL), **fields))
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
def test_recorded_requests_give_the_engines_own_ids(recording: Path) -> None:
    tokenizer = load()
    compared = 0
    for line in recording.read_text().splitlines():
        entry = json.loads(line)
        if entry.get("prompt_token_ids") and entry.get("path") in (CHAT_PATH, COMPLETIONS_PATH):
            (prompt,) = parse(entry["path"], json.dumps(entry["body"]).encode()).prompts[:1]
            assert tokenizer.encode(prompt).tolist() == entry["prompt_token_ids"]
            compared += 1
    assert compared >= 2


def test_token_ids_pass_through() -> None:
    ids = array("I", [5, 6])
    assert load().encode(ids) is ids


def test_a_template_given_by_the_operator_wins(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}")
    prompt = Chat([{"role": "user", "content": "hello"}], {})
    assert load(chat_template=str(file)).encode(prompt) == load().encode(Text("hello"))


@pytest.mark.parametrize(
    "entry",
    ["{{ messages[0].content }}", [{"name": "default", "template": "{{ messages[0].content }}"}]],
)
def test_the_template_may_lie_in_the_tokenizers_configuration(
    tmp_path: Path, entry: object
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((TINY_MODEL / "tokenizer.json").read_bytes())
    settings = {"chat_template": entry, "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.load(Model("m", tokenizer=str(tmp_path)))
    assert tokenizer is not None
    prompt = Chat([{"role": "user", "content": "hello"}], {})
    assert tokenizer.encode(prompt) == load().encode(Text("hello"))


def test_a_model_without_a_template_takes_text_only(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((TINY_MODEL / "tokenizer.json").read_bytes())
    tokenizer = Tokenizer.load(Model("m", tokenizer=str(tmp_path / "tokenizer.json")))
    assert tokenizer is not None
    assert len(tokenizer.encode(Text("hello"))) > 0
    with pytest.raises(RequestError, match="no_chat_template"):
        tokenizer.encode(Chat([{"role": "user", "content": "hello"}], {}))


def test_a_model_without_a_tokenizer_has_none(caplog: pytest.LogCaptureFixture) -> None:
    assert Tokenizer.load(Model("m")) is None
    assert Tokenizer.load(Model("m", tokenizer=RemoteTokenizer())) is None
    assert "remote tokenizers are not asked yet" in caplog.text


def test_truncation_and_padding_left_in_the_file_are_switched_off(tmp_path: Path) -> None:
    content = json.loads((TINY_MODEL / "tokenizer.json").read_bytes())
    content["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    content["padding"] = {
        "strategy": {"Fixed": 99}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
        "pad_type_id": 0, "pad_token": "x",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer.load(Model("m", tokenizer=str(tmp_path)))
    assert tokenizer is not None
    text = Text("a prompt of more than two tokens")
    assert tokenizer.encode(text) == load().encode(text)


def test_a_file_that_is_no_tokenizer_is_told_at_start(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartError, match="model m: "):
        Tokenizer.load(Model("m", tokenizer=str(tmp_path)))


def test_a_lone_surrogate_cannot_be_tokenized() -> None:
    with pytest.raises(RequestError, match="not_unicode"):
        load().encode(Text("\ud800"))


def test_a_hub_id_is_found_in_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / "abc"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc\n")
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").write_text("{}")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert TokenizerFiles.find("org/name").tokenizer == snapshot / "tokenizer.json"


@pytest.mark.parametrize("source", ["org/absent", "../../etc"])
def test_what_is_nowhere_says_where_was_looked(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"is no directory or file|no tokenizer\.json"):
        TokenizerFiles.find(source)


def test_a_directory_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json in"):
        TokenizerFiles.find(str(tmp_path))
