import os
from pathlib import Path

import pytest

from extproc.tokenizer_files import TokenizerFiles


def test_a_file_lies_in_its_models_directory(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    expected = TokenizerFiles(tmp_path / "tokenizer.json")
    assert TokenizerFiles.find(str(tmp_path)) == expected
    assert TokenizerFiles.find(str(tmp_path / "tokenizer.json")) == expected
    assert expected.directory == tmp_path


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


@pytest.mark.parametrize("source", ["", "tokenizer.json"])
def test_a_tokenizer_that_this_user_may_not_read_is_refused(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    monkeypatch.setattr(os, "access", lambda path, _: path != file)  # root may read everything
    with pytest.raises(PermissionError, match="Permission denied") as caught:
        TokenizerFiles.find(str(tmp_path / source))
    assert caught.value.filename == str(file)
