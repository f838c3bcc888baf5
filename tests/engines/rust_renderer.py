"""vLLM's Rust front end without an engine: `vllm-rs render`, from vLLM's wheel.

It needs no GPU and no weights, and starts in a second. KVSTEER_VLLM_RS names the program; without
that, it is looked for beside the vLLM of KVSTEER_VLLM_PYTHON.
"""

import http.client
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from tests.engines.vllm_engine import PYTHON
from tests.ports import free_port
from tests.waiting import blocked_until

TINY_MODEL = Path("kvtools/simulator/tiny_model")

# How today's tokenizers cut a text: not as GPT-2's, which this front end cuts in its own way.
_CUT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_START_SECONDS = 60.0
_FIND = "import importlib.util as u; print(u.find_spec('vllm').origin)"


@cache
def program() -> Path | None:
    """Returns the program, None if there is none."""
    named = os.environ.get("KVSTEER_VLLM_RS")
    if named is None:
        found = subprocess.run([PYTHON, "-c", _FIND], capture_output=True, text=True, check=False)
        named = str(Path(found.stdout.strip()).parent / "vllm-rs")
    path = Path(named)
    return path if path.is_file() else None


def why_not() -> str:
    """Returns why nothing can be rendered, "" if it can."""
    return "" if program() else "no vllm-rs: neither KVSTEER_VLLM_RS nor KVSTEER_VLLM_PYTHON has it"


def make_model(directory: Path, template: str = "", model_type: str = "", name: str = "") -> Path:
    """Makes the directory of a model with the simulator's vocabulary.

    template: in a file of its own. model_type, name: of a family that is rendered in code.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((TINY_MODEL / "tokenizer.json").read_text())
    tokenizer["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": _CUT},
                "behavior": "Isolated",
                "invert": False,
            },
            {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": False,
            },
        ],
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    if template:
        (directory / "chat_template.jinja").write_text(template)
    config = {
        "architectures": [name or "LlamaForCausalLM"],
        "model_type": model_type or "llama",
        "vocab_size": 1 << 15,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class RustRenderer:
    """A running one. connection: to its server."""

    def __init__(self, connection: http.client.HTTPConnection) -> None:
        self._connection = connection

    def ids(self, body: dict[str, Any]) -> list[int] | None:
        """Returns the ids of a chat completion's prompt, None if it is refused."""
        asked = json.dumps({**body, "model": "tiny"}).encode()
        headers = {"content-type": "application/json"}
        self._connection.request("POST", "/v1/chat/completions/render", asked, headers)
        with self._connection.getresponse() as answer:
            told = answer.read()
            assert answer.status in (200, 400, 422), told
            return json.loads(told)["token_ids"] if answer.status == 200 else None


@contextmanager
def rendering(directory: Path, *options: str) -> Iterator[RustRenderer]:
    """Runs the program with a model."""
    found, port = program(), free_port()
    assert found is not None
    command = [str(found), "render", str(directory), "--port", str(port)]
    command += ["--served-model-name", "tiny", "--tool-call-parser", "hermes"]
    command += ["--reasoning-parser", "none", *options]
    with subprocess.Popen(
        command,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            _await(process, port)
            with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
                yield RustRenderer(connection)
        finally:
            process.kill()


def _await(process: subprocess.Popen[bytes], port: int) -> None:
    def is_listening() -> bool:
        assert process.poll() is None, f"{program()} has ended"
        with suppress(OSError):
            socket.create_connection(("127.0.0.1", port)).close()
            return True
        return False

    blocked_until(is_listening, "vllm-rs listens", seconds=_START_SECONDS)
