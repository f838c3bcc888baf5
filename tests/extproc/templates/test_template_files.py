import contextlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from extproc.base.errors import RequestError
from extproc.requests.prompt import Chat
from extproc.tokenizing.tokens import ChatTemplates, load

USER = {"role": "user", "content": "hi"}
TOOLS = {"tools": [{"type": "function", "function": {"name": "f"}}]}
NAMED = [{"name": "default", "template": "default"}, {"name": "tool_use", "template": "tools"}]

LAYOUTS: dict[str, dict[str, str]] = {
    "settings": {"tokenizer_config.json": '{"chat_template": "settings"}'},
    "named settings": {"tokenizer_config.json": json.dumps({"chat_template": NAMED})},
    "file": {"chat_template.jinja": "file"},
    "file wins": {"chat_template.jinja": "file", "tokenizer_config.json": '{"chat_template": "s"}'},
    "files": {
        "chat_template.jinja": "file",
        "additional_chat_templates/tool_use.jinja": "tools",
        "additional_chat_templates/rag.jinja": "rag",
        "tokenizer_config.json": json.dumps({"chat_template": NAMED}),
    },
    "special tokens": {
        "chat_template.jinja": "{{ bos_token }}{{ eos_token }}",
        "tokenizer_config.json": json.dumps(
            {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}}
        ),
    },
    "no default": {"additional_chat_templates/rag.jinja": "rag"},
    "none": {},
}


def write(directory: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(content)
    return directory


def templates_in(directory: Path, override: Path | None = None) -> ChatTemplates:
    return load(directory, {"bos_token": "<s>", "eos_token": "</s>"}, override)


def render(templates: ChatTemplates, **variables: Any) -> str | None:
    with contextlib.suppress(RequestError):
        return templates.chosen(variables).render(Chat([USER], variables))[0]
    return None


@pytest.mark.parametrize(
    ("layout", "plain", "with_tools"),
    [
        ("settings", "settings", "settings"),
        ("named settings", "default", "tools"),
        ("file", "file", "file"),
        ("file wins", "file", "file"),
        ("files", "file", "tools"),
        ("special tokens", "<s></s>", "<s></s>"),
        ("no default", None, None),
        ("none", None, None),
    ],
)
def test_request_gets_the_template_that_an_engine_chooses(
    tmp_path: Path, layout: str, plain: str | None, with_tools: str | None
) -> None:
    templates = templates_in(write(tmp_path, LAYOUTS[layout]))
    assert (render(templates), render(templates, **TOOLS)) == (plain, with_tools)


def test_missing_template_is_a_reason(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no_chat_template"):
        templates_in(tmp_path).chosen({})


def test_processor_template_precedes_others_without_tools(tmp_path: Path) -> None:
    files = {**LAYOUTS["settings"], "chat_template.json": '{"chat_template": "processor"}'}
    templates = templates_in(write(tmp_path, files))
    assert (render(templates), render(templates, **TOOLS)) == ("processor", "settings")


def test_operator_template_precedes_the_files(tmp_path: Path) -> None:
    override = tmp_path / "own.jinja"
    override.write_text("own")
    templates = templates_in(write(tmp_path, LAYOUTS["files"]), override)
    assert (render(templates), render(templates, **TOOLS)) == ("own", "own")


@pytest.mark.parametrize(
    "entry", [["{{ x }}"], [{"name": "default"}], "{% for %}", [{"name": 1, "template": "{{"}]]
)
def test_malformed_template_is_refused_at_start(tmp_path: Path, entry: object) -> None:
    files = {"tokenizer_config.json": json.dumps({"chat_template": entry})}
    with pytest.raises(ValueError, match="template"):
        templates_in(write(tmp_path, files))


def test_template_of_another_type_is_none(tmp_path: Path) -> None:
    assert (
        render(templates_in(write(tmp_path, {"tokenizer_config.json": '{"chat_template": 5}'})))
        is None
    )


def test_before_media_uses_the_same_template(tmp_path: Path) -> None:
    source = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    templates = templates_in(write(tmp_path, {"chat_template.jinja": source}))
    image = [{"type": "image"}]
    messages: list[dict[str, Any]] = [USER, {"role": "user", "content": image}]
    chat = Chat(messages, {})
    assert templates.chosen({}).render_until_media(chat, added_tokens=()) == ("[hi][", 0)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_template_choice_equals_that_of_transformers(tmp_path: Path, layout: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip(
            "transformers", reason="needs transformers (dependency group `parity`)"
        )
        tokenizers = pytest.importorskip("tokenizers")
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        theirs = transformers.PreTrainedTokenizerFast.from_pretrained(
            str(write(tmp_path, LAYOUTS[layout]))
        )
    ours = templates_in(tmp_path)
    for given in ({}, TOOLS):
        expected = None
        with contextlib.suppress(ValueError):
            expected = theirs.apply_chat_template([USER], tokenize=False, **given)
        assert render(ours, **given) == expected


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.json"])
def test_deeply_nested_settings_are_refused_at_start(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: nested too deeply"):
        templates_in(write(tmp_path, {name: "[" * 200_000}))


@pytest.mark.parametrize("source", ["{{ " + "(" * 15_000, "{{ x" + "|trim" * 15_000 + " }}"])
def test_deeply_nested_template_is_refused_at_start(tmp_path: Path, source: str) -> None:
    with pytest.raises(ValueError, match="not a Jinja template"):
        templates_in(write(tmp_path, {"chat_template.jinja": source}))


def test_pipe_in_place_of_a_template_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "additional_chat_templates"
    folder.mkdir()
    os.mkfifo(folder / "more.jinja")
    templates_in(write(tmp_path, {"chat_template.jinja": "x"}))
