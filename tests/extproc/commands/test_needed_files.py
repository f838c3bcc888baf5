"""What `kvsteer check` says about the files of tokenizers and templates."""

import json
import shutil
from pathlib import Path

import pytest

from extproc.commands.needed_files import NEEDED_FILES, template_notes
from extproc.config.schema import Config, Model
from kvtools.simulator.settings import TINY_MODEL


def config_with(tmp_path: Path, **files: str) -> Config:
    """A model's directory with files changed; names without dots, `json` at the end."""
    directory = tmp_path / "m"
    shutil.copytree(TINY_MODEL, directory)
    for name, content in files.items():
        (directory / name.replace("_json", ".json").replace("_jinja", ".jinja")).write_text(content)
    return Config(models=(Model("m", tokenizer=str(directory)),))


def faults(config: Config) -> list[str]:
    return [fault for rule in NEEDED_FILES for fault in rule(config)]


def test_model_with_whole_files_has_no_fault(tmp_path: Path) -> None:
    config = config_with(tmp_path)
    assert (faults(config), list(template_notes(config))) == ([], [])


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("added_tokens_json", "{", "models[0].tokenizer: added_tokens.json: no JSON: "),
        (
            "special_tokens_map_json",
            "5",
            "models[0].tokenizer: special_tokens_map.json: not a JSON",
        ),
        ("chat_template_jinja", "{% for %}", "models[0].chat_template: "),
    ],
)
def test_damaged_file_of_a_tokenizer_is_a_fault(
    tmp_path: Path, name: str, content: str, fault: str
) -> None:
    (said,) = faults(config_with(tmp_path, **{name: content}))
    assert said.startswith(fault)


def test_template_that_names_what_is_lacking_is_noted(tmp_path: Path) -> None:
    config = config_with(tmp_path, chat_template_jinja="{{ messages|random }}{{ lipsum() }}")
    (note,) = template_notes(config)
    assert note.startswith(
        "models[0].tokenizer: its chat template names lipsum(), the filter random"
    )


def test_template_of_a_model_in_code_is_not_read(tmp_path: Path) -> None:
    architecture = json.dumps({"architectures": ["DeepseekV32ForCausalLM"]})
    config = config_with(tmp_path, chat_template_jinja="{% for %}", config_json=architecture)
    assert (faults(config), list(template_notes(config))) == ([], [])


@pytest.mark.parametrize("tokenizer", [None, "/nowhere"])
def test_model_without_files_has_no_fault_here(tokenizer: str | None) -> None:
    config = Config(models=(Model("m", tokenizer=tokenizer),))
    assert (faults(config), list(template_notes(config))) == ([], [])
