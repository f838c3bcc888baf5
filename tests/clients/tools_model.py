"""A tiny model with tools and a long context, as agents need it."""

import json
import shutil
from pathlib import Path

from kvtools.simulator.settings import TINY_MODEL
from tests.clients.starts import CONTEXT_TOKENS
from tests.extproc.template_shapes import QWEN_TOOLS


def write_tools_model(folder: Path, template: str = QWEN_TOOLS) -> Path:
    """Writes the model's directory, and returns it."""
    shutil.copytree(TINY_MODEL, folder)
    (folder / "chat_template.jinja").write_text(template)
    for name, key in (
        ("config.json", "max_position_embeddings"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        about = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(about | {key: CONTEXT_TOKENS}))
    return folder
