from pathlib import Path

import pytest

from extproc.base.tokenizer_files import TokenizerFiles
from tests.unprivileged import unprivileged


def test_find_returns_a_file_in_the_model_directory(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    expected = TokenizerFiles(tmp_path / "tokenizer.json")
    assert TokenizerFiles.find(str(tmp_path)) == expected
    assert TokenizerFiles.find(str(tmp_path / "tokenizer.json")) == expected
    assert expected.directory == tmp_path


def test_find_resolves_a_hub_id_in_the_local_cache(
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
def test_find_names_the_places_searched(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"is no directory or file|no tokenizer\.json"):
        TokenizerFiles.find(source)


def test_find_names_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json in"):
        TokenizerFiles.find(str(tmp_path))


@pytest.mark.parametrize("source", ["", "tokenizer.json"])
def test_find_refuses_an_unreadable_tokenizer(source: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    file.chmod(0)
    with (
        unprivileged(tmp_path),
        pytest.raises(PermissionError, match="Permission denied") as caught,
    ):
        TokenizerFiles.find(str(tmp_path / source))
    assert caught.value.filename == str(file)
