from pathlib import Path

import pytest
import yaml

from extproc.config.owned_headers import RESERVED
from tests.deploy.envoy_files import EXPLAINED, envoy_files, with_removed
from tests.imports import ROOT

FILES = dict(envoy_files())


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_file_is_the_one_that_make_envoy_files_writes(path: Path) -> None:
    assert path.read_text() == FILES[path]


@pytest.mark.parametrize("name", EXPLAINED)
def test_removed_headers_of_an_explained_file_are_replaced_and_nothing_else(name: str) -> None:
    text = (ROOT / name).read_text()
    changed = with_removed(text, ("x-one", "x-two", "x-three"))
    assert "x-three" in changed
    assert not any(f"remove: {one}" in changed for one in RESERVED)
    assert [*yaml.safe_load_all(changed)] != [*yaml.safe_load_all(text)]
    assert with_removed(changed, tuple(sorted(RESERVED))) == with_removed(
        text, tuple(sorted(RESERVED))
    )
