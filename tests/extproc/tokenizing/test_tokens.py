import json
import shutil
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Tokenizers
from tokenizers import processors

from extproc.base.errors import RequestError, StartError
from extproc.config.schema import Model, RemoteTokenizerSettings
from extproc.requests.prompt import CUT, FRAME, Conversion
from extproc.requests.request import CHAT_PATH, COMPLETIONS_PATH, Chat, Text, parse
from extproc.tokenizing.tokens import Tokenizer
from kvtools.simulator.settings import TINY_MODEL
from tests.extproc.tokenizer_kinds import tokenizer_of

RECORDINGS = sorted((Path(__file__).parents[2] / "wire").glob("vllm_0.32.0_*.jsonl"))


def load(**fields: Any) -> Tokenizer:
    tokenizer = Tokenizer.load(Model("tiny", tokenizer=str(TINY_MODEL), **fields))
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
def test_recorded_requests_give_the_ids_of_the_engine(recording: Path) -> None:
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


def test_operator_template_precedes_the_files(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }}")
    prompt = Chat([{"role": "user", "content": "hello"}], {})
    assert load(chat_template=str(file)).encode(prompt) == load().encode(Text("hello"))


@pytest.mark.parametrize(
    "entry",
    ["{{ messages[0].content }}", [{"name": "default", "template": "{{ messages[0].content }}"}]],
)
def test_template_may_lie_in_the_configuration_of_the_tokenizer(
    tmp_path: Path, entry: object
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((TINY_MODEL / "tokenizer.json").read_bytes())
    settings = {"chat_template": entry, "bos_token": {"__type": "AddedToken", "content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.load(Model("m", tokenizer=str(tmp_path)))
    assert tokenizer is not None
    prompt = Chat([{"role": "user", "content": "hello"}], {})
    assert tokenizer.encode(prompt) == load().encode(Text("hello"))


def test_model_without_a_template_accepts_text_only(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((TINY_MODEL / "tokenizer.json").read_bytes())
    tokenizer = Tokenizer.load(Model("m", tokenizer=str(tmp_path / "tokenizer.json")))
    assert tokenizer is not None
    assert len(tokenizer.encode(Text("hello"))) > 0
    with pytest.raises(RequestError, match="no_chat_template"):
        tokenizer.encode(Chat([{"role": "user", "content": "hello"}], {}))


def test_model_without_files_has_no_local_tokenizer() -> None:
    assert Tokenizer.load(Model("m")) is None
    assert Tokenizer.load(Model("m", tokenizer=RemoteTokenizerSettings())) is None


def test_truncation_and_padding_of_the_file_are_disabled(tmp_path: Path) -> None:
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


def test_malformed_tokenizer_file_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartError, match="model m: "):
        Tokenizer.load(Model("m", tokenizer=str(tmp_path)))


def test_lone_surrogate_is_refused() -> None:
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


def test_special_tokens_frame_the_text(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, "Metaspace first")
    library = tokenizer_of("Metaspace first")
    assert tokenizer.encode(Text("The fox")).tolist() == library.encode("The fox").ids
    bare = library.encode("The fox", add_special_tokens=False).ids
    assert tokenizer.encode(Text("The fox", add_special_tokens=False)).tolist() == bare


def test_next_turn_counts_its_new_characters_only() -> None:
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


def test_chat_with_media_is_tokenized_up_to_the_media(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, "Llama 3")
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "The quick brown fox"},
        {"role": "user", "content": [{"type": "text", "text": "what is"}, {"type": "image"}]},
    ]
    claimed = tokenizer.encode(Chat(messages, {}, add_special_tokens=True, has_media=True))
    text = "<|im_start|>system\nThe quick brown fox<|im_end|>"
    assert claimed.tolist() == tokenizer_of("Llama 3").encode(text).ids


def test_chat_that_begins_with_media_is_refused(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, "Llama 3")
    messages = [{"role": "user", "content": [{"type": "image"}]}]
    with pytest.raises(RequestError, match="unsupported_media"):
        tokenizer.encode(Chat(messages, {}, has_media=True))


def test_media_for_sglang_are_refused_if_only_the_tokenizer_adds_a_first_token(
    tmp_path: Path,
) -> None:
    tokenizer = loaded(tmp_path, "Llama 3")
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]
    chat = Chat(messages, {}, has_media=True, media=(("image", {}),), conversion=Conversion())
    with pytest.raises(RequestError, match="unsupported_special_tokens"):
        tokenizer.encode(chat)


def test_varying_special_tokens_are_accepted_only_by_a_tokenizer_without_them(
    tmp_path: Path,
) -> None:
    text = Text("The fox", special_tokens_vary=True)
    assert len(load().encode(text)) > 0
    with pytest.raises(RequestError, match="unsupported_special_tokens"):
        loaded(tmp_path, "Llama 3").encode(text)


def test_unknown_frame_is_left_to_the_library(
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


def test_tokenizer_may_be_shared_by_threads() -> None:
    tokenizer = load()
    texts = [f"<|im_start|>user\n{word * 900}<|im_end|>" for word in ("a b ", "c ", "d e f ")]
    expected = [load().encode(Text(text)) for text in texts]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda turn: tokenizer.encode(Text(texts[turn % 3])), range(300)))
    assert found == expected * 100


def declaring(directory: Path, **settings: object) -> Path:
    """Returns the tiny model's directory with other settings of its tokenizer."""
    shutil.copytree(TINY_MODEL, directory, dirs_exist_ok=True)
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return directory


def test_special_token_that_only_the_settings_name_is_one_token(tmp_path: Path) -> None:
    directory = declaring(tmp_path, eos_token="<|end|>", pad_token="<|pad|>")
    from transformers import AutoTokenizer  # a second, which collecting tests need not take

    library = AutoTokenizer.from_pretrained(str(directory))
    ours = Tokenizer.load(Model("m", tokenizer=str(directory)))
    assert ours is not None
    said = "a<|end|>b <|pad|> c"
    assert ours.encode(Text(said)).tolist() == library.encode(said)


def test_tokenizer_that_some_releases_rebuild_makes_a_form_of_its_own(tmp_path: Path) -> None:
    directory = declaring(tmp_path, tokenizer_class="LlamaTokenizerFast", bos_token="<|im_start|>")
    doubtful = Tokenizer.load(Model("m", tokenizer=str(directory)))
    assert doubtful is not None
    assert doubtful.start(Text("a")).forms == CUT | FRAME
    assert load().start(Text("a")).forms == 0
