import json
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Tokenizers
from tokenizers import processors

from extproc.config.schema import Model, RemoteTokenizer
from extproc.errors import RequestError, StartError
from extproc.requests.request import CHAT_PATH, COMPLETIONS_PATH, Chat, Text, parse
from extproc.tokenizing.tokens import Tokenizer
from simulator.settings import TINY_MODEL
from tests.extproc.tokenizer_kinds import tokenizer_of

RECORDINGS = sorted((Path(__file__).parents[2] / "wire").glob("vllm_0.32.0_*.jsonl"))


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


def test_a_model_without_files_has_no_tokenizer_here() -> None:
    assert Tokenizer.load(Model("m")) is None
    assert Tokenizer.load(Model("m", tokenizer=RemoteTokenizer())) is None


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


TEMPLATE = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.content is string %}{{ m.content }}{% else %}
{%- for part in m.content %}{{ part.text if part.type == 'text' else '<|image|>' }}{% endfor %}
{%- endif %}<|im_end|>{% endfor %}"""


def loaded(directory: Path, kind: str, template: str = TEMPLATE) -> Tokenizer:
    """A tokenizer of tests/extproc/tokenizer_kinds.py, loaded from files like a model's."""
    tokenizer_of(kind).save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(Model("m", tokenizer=str(directory)))
    assert tokenizer is not None
    return tokenizer


def test_added_special_tokens_stand_around_the_text(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, "Metaspace first")
    library = tokenizer_of("Metaspace first")
    assert tokenizer.encode(Text("The fox")).tolist() == library.encode("The fox").ids
    bare = library.encode("The fox", add_special_tokens=False).ids
    assert tokenizer.encode(Text("The fox", add_special_tokens=False)).tolist() == bare


def test_only_the_new_text_of_a_turn_has_to_be_tokenized() -> None:
    tokenizer = load()
    turns: list[dict[str, Any]] = [{"role": "user", "content": "hello " * 2_000}]
    assert tokenizer.start(Chat(turns, {})).new_characters > 12_000
    tokenizer.encode(Chat(turns, {}))
    turns += [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "and?"}]
    second = tokenizer.start(Chat(turns, {}))
    assert second.new_characters < 100
    assert second.is_cheap
    assert second.finish() == load().encode(Chat(turns, {}))


def test_token_ids_need_no_work() -> None:
    ids = array("I", [5, 6])
    started = load().start(ids)
    assert (started.new_characters, started.is_cheap) == (0, True)
    assert started.finish() is ids


def test_of_a_chat_with_media_what_stands_before_is_claimed(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, "Llama 3")
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "The quick brown fox"},
        {"role": "user", "content": [{"type": "text", "text": "what is"}, {"type": "image"}]},
    ]
    claimed = tokenizer.encode(Chat(messages, {}, add_special_tokens=True, has_media=True))
    text = "<|im_start|>system\nThe quick brown fox<|im_end|>"
    assert claimed.tolist() == tokenizer_of("Llama 3").encode(text).ids


def test_a_chat_that_begins_with_media_claims_nothing(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, "Llama 3")
    messages = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(RequestError, match="unsupported_media"):
        tokenizer.encode(Chat(messages, {}, has_media=True))


def test_where_releases_disagree_on_special_tokens_only_a_tokenizer_without_them_is_certain(
    tmp_path: Path,
) -> None:
    text = Text("The fox", special_tokens_vary=True)
    assert len(load().encode(text)) > 0
    with pytest.raises(RequestError, match="unsupported_special_tokens"):
        loaded(tmp_path, "Llama 3").encode(text)


def test_what_is_put_around_a_text_in_an_unknown_way_is_left_to_the_library(
    tmp_path: Path,
) -> None:
    library = Tokenizers.from_str(tokenizer_of("Llama 3").to_str())
    bos = [("<s>", library.get_vocab()["<s>"])]
    twice = processors.TemplateProcessing(single="<s> $A", special_tokens=bos)
    library.post_processor = processors.Sequence([twice, twice])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.load(Model("m", tokenizer=str(tmp_path)))
    assert tokenizer is not None
    assert tokenizer.encode(Text("The fox")).tolist() == library.encode("The fox").ids
    messages = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(RequestError, match="unsupported_special_tokens"):
        tokenizer.encode(Chat(messages, {}, add_special_tokens=True, has_media=True))


def test_threads_may_share_a_tokenizer() -> None:
    tokenizer = load()
    texts = [f"<|im_start|>user\n{word * 900}<|im_end|>" for word in ("a b ", "c ", "d e f ")]
    expected = [load().encode(Text(text)) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda turn: tokenizer.encode(Text(texts[turn % 3])), range(300)))
    assert found == expected * 100
