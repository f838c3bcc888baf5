"""SGLang's own request models and conversions against ours; neither engine nor GPU is needed."""

import os
from pathlib import Path

import pytest

from extproc.config.schema import Model
from extproc.tokenizing.tokens import Tokenizer
from tests.engines.sglang_judge import answers, model_with
from tests.extproc.sglang.test_values import EVERY, prompt_of
from tests.extproc.sglang.values import CASES, TEMPLATES, unknown_fields


@pytest.fixture
def python() -> str:
    named = os.environ.get("KVSTEER_SGLANG_PYTHON")
    if not named:
        pytest.skip("KVSTEER_SGLANG_PYTHON names no Python with SGLang")
    return named


@pytest.mark.engine
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("column", [0, 1])
def test_planted_fields_are_read_as_sglang_reads_them(
    python: str, column: int, tmp_path: Path
) -> None:
    model = model_with(TEMPLATES[column], tmp_path / "model")
    tokenizer = Tokenizer.load(Model("m", tokenizer=str(model)))
    assert tokenizer is not None
    planted = [
        case._replace(body=body) for case in CASES[::EVERY] for body in unknown_fields(case.body)
    ]
    asked = [*CASES, *planted]
    others = []
    for case, told in zip(asked, answers(python, model, asked), strict=True):
        prompt = prompt_of(case)
        if "refused" in told:
            continue
        ids = prompt if isinstance(prompt, str) else [*tokenizer.encode(prompt)]
        if ids != told["ids"]:
            others.append((case, ids))
    assert others == []
