"""SGLang's own front end as a judge of prompts: `tests/clients/sglang_renderer.py` in its Python.

    python -m tests.engines.sglang_judge PYTHON-WITH-SGLANG

writes the prompts of tests/extproc/sglang/values.py anew, to values.jsonl beside it.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvtools.simulator.settings import TINY_MODEL
from tests.extproc.sglang.values import CASES, RECORDED, TEMPLATES, Case

RENDERER = Path(__file__).parents[1] / "clients" / "sglang_renderer.py"


def model_with(template: str, directory: Path) -> Path:
    """Makes a model that has this template, and returns its directory."""
    shutil.copytree(TINY_MODEL, directory)
    (directory / "chat_template.jinja").write_text(template)
    return directory


def answers(python: str, model: Path, asked: Iterable[Case]) -> Iterator[dict[str, Any]]:
    """Yields what SGLang makes of requests: `ids`, or `refused`."""
    lines = [json.dumps({"path": case.path, "body": case.body}) + "\n" for case in asked]
    done = subprocess.run(
        [python, str(RENDERER), str(model)],
        input="".join(lines),
        capture_output=True,
        text=True,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert "version" in found[0], "SGLang's front end did not start"
    assert len(found) == 1 + len(lines)
    yield from found[1:]


def record(python: str) -> None:
    """Writes the prompts of all cases."""
    read = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    with tempfile.TemporaryDirectory() as folder:
        columns = []
        for number, template in enumerate(TEMPLATES):
            model = model_with(template, Path(folder) / str(number))
            columns.append([*answers(python, model, CASES)])
    rows = [
        None
        if "refused" in cells[0]
        else [read.decode(cell["ids"], skip_special_tokens=False) for cell in cells]
        for cells in zip(*columns, strict=True)
    ]
    RECORDED.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    record(sys.argv[1])
