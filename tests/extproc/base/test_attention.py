import json
from pathlib import Path
from typing import Any

import pytest

from extproc.base.attention import has_hybrid_files, is_hybrid
from kvtools.simulator.settings import TINY_MODEL

WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("config", "hybrid"),
    [
        (WINDOWS, True),
        ({"text_config": WINDOWS}, True),
        ({"layer_types": ["full_attention"], "full_attention_interval": 4}, False),
        ({"hybrid_override_pattern": "M-M*"}, True),
        ({"linear_attn_config": {"kda_layers": [1]}, "text_config": None}, True),
        ({"sliding_window": 4096}, False),
        ({"layer_types": []}, False),
        ([], False),
    ],
)
def test_config_says_whether_a_model_is_a_hybrid(config: Any, *, hybrid: bool) -> None:
    assert is_hybrid(json.dumps(config).encode()) is hybrid


@pytest.mark.parametrize("config", [b"", b"\xff", b"[" * 5000, b'{"layer_types":'])
def test_unreadable_config_says_nothing(config: bytes) -> None:
    assert not is_hybrid(config)


def test_files_of_a_model_are_read_where_its_tokenizer_is(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((TINY_MODEL / "tokenizer.json").read_bytes())
    assert not has_hybrid_files(str(tmp_path)), "it has no config.json"
    (tmp_path / "config.json").write_text(json.dumps(WINDOWS))
    assert has_hybrid_files(str(tmp_path))
    assert not has_hybrid_files(str(TINY_MODEL))
    assert not has_hybrid_files(str(tmp_path / "nowhere"))
