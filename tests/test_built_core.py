import os
from pathlib import Path

from tests.built_core import stale_core


def test_stale_core_names_the_command_that_rebuilds_it(
    tmp_path: Path,
) -> None:
    core, source = tmp_path / "_core.abi3.so", tmp_path / "index.c"
    core.touch()
    source.touch()
    os.utime(core, (1_000, 1_000))
    os.utime(source, (1_001, 1_001))
    assert "older than index.c" in stale_core(core, tmp_path)
    assert "python setup.py build_ext --inplace" in stale_core(core, tmp_path)
    os.utime(core, (1_002, 1_002))
    assert stale_core(core, tmp_path) == ""
    assert "is missing: build it with" in stale_core(None, tmp_path)
