from pathlib import Path

import pytest

from extproc.base.atomic_file import OWNER_ONLY, READABLE_BY_ALL, replace_file


@pytest.mark.parametrize(("mode", "is_durable"), [(OWNER_ONLY, True), (READABLE_BY_ALL, False)])
def test_replace_file_leaves_one_file_with_its_mode(
    tmp_path: Path, mode: int, *, is_durable: bool
) -> None:
    path = tmp_path / "file"
    for content in (b"first and long", b"last"):
        replace_file(str(path), content, mode, is_durable=is_durable)
        assert path.read_bytes() == content
    assert path.stat().st_mode & 0o777 == mode
    assert list(tmp_path.iterdir()) == [path]


def test_replace_file_leaves_nothing_behind_if_it_fails(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        replace_file(str(tmp_path / "folder"), b"", is_durable=False)
    assert list(tmp_path.iterdir()) == [tmp_path / "folder"]
