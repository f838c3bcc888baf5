"""The digest of a model's files: another one whenever the tokens may be others."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from extproc.config.schema import Model, RemoteTokenizerSettings
from extproc.tokenizing import file_digest
from extproc.tokenizing.file_digest import digest_of
from kvtools.simulator.settings import TINY_MODEL


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """A model with its files, which a test may change."""
    directory = tmp_path / "model"
    shutil.copytree(TINY_MODEL, directory)
    return Model(name="tiny", tokenizer=str(directory))


def directory_of(model: Model) -> Path:
    assert isinstance(model.tokenizer, str)
    return Path(model.tokenizer)


def changed(model: Model, name: str, content: bytes) -> bytes | None:
    (directory_of(model) / name).write_bytes(content)
    return digest_of(model, "1.0")


def test_digest_depends_on_every_file_that_is_read(model: Model) -> None:
    first = digest_of(model, "1.0")
    assert first is not None
    assert digest_of(model, "1.0") == first
    assert changed(model, "model.safetensors", b"weights") == first
    os.mkfifo(directory_of(model) / "pipe")
    assert digest_of(model, "1.0") == first
    (directory_of(model) / "additional_chat_templates").mkdir()
    found = {
        first,
        digest_of(model, "1.1"),
        changed(model, "additional_chat_templates/tool_use.jinja", b"{{ tools }}"),
        changed(model, "tokenizer_config.json", b"{}"),
    }
    assert len(found) == 4


def test_digest_depends_on_the_configured_template(model: Model, tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("one")
    configured = replace(model, chat_template=str(template))
    first = digest_of(configured, "1.0")
    template.write_text("two")
    assert None not in {first, digest_of(configured, "1.0")}
    assert len({first, digest_of(configured, "1.0"), digest_of(model, "1.0")}) == 3


def test_models_without_files_here_have_none(model: Model) -> None:
    remote = replace(model, tokenizer=RemoteTokenizerSettings(remote=True))
    gone = replace(model, tokenizer="/nowhere")
    assert (digest_of(remote, "1.0"), digest_of(gone, "1.0")) == (None, None)
    for number in range(file_digest.MAX_FILES):
        Path(str(model.tokenizer), f"{number}.txt").touch()
    assert digest_of(model, "1.0") is None
