"""A real SGLang engine on a CPU, with random weights."""

import json
import os
import subprocess
from pathlib import Path

from kvtools.simulator.settings import TINY_MODEL
from tests.engines.vllm_engine import BLOCK_TOKENS, CONTEXT_TOKENS, Engine, Model

# An interpreter with an SGLang that can serve on this machine, unlike that of
# KVSTEER_SGLANG_PYTHON, whose front end is enough.
PYTHON = os.environ.get("KVSTEER_SGLANG_SERVER", "")

_HAS_SGLANG = "import importlib.util, sys; sys.exit(importlib.util.find_spec('sglang') is None)"
_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "TRANSFORMERS_OFFLINE": "1"}
TINY = Model(TINY_MODEL, CONTEXT_TOKENS, environment=_ENVIRONMENT)


def missing() -> str:
    """Why no engine can be started, "" if one can."""
    if not PYTHON:
        return "KVSTEER_SGLANG_SERVER names no Python with an SGLang that serves"
    try:
        has_it = subprocess.run([PYTHON, "-c", _HAS_SGLANG], check=False).returncode == 0
    except OSError as error:
        return f"{PYTHON}: {error.strerror}"
    return "" if has_it else f"{PYTHON} has no SGLang"


class SglangEngine(Engine):
    """One engine, which is used as vLLM's are."""

    def __init__(self, directory: Path, blocks: int, *, model: Model = TINY) -> None:
        super().__init__(directory, blocks, 10_000, model=model)

    def _command(self) -> list[str]:
        events = {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{self.ports.events}",
            "replay_endpoint": f"tcp://*:{self.ports.replay}",
        }
        options = {
            "--model-path": str(self._model.directory),
            "--served-model-name": "tiny",
            "--load-format": "dummy",
            "--host": "127.0.0.1",
            "--port": str(self.ports.http),
            "--device": "cpu",
            "--attention-backend": "torch_native",
            "--sampling-backend": "pytorch",
            "--context-length": str(self._model.context_tokens),
            "--page-size": str(BLOCK_TOKENS),
            "--max-total-tokens": str(self._blocks * BLOCK_TOKENS),
            "--max-running-requests": "8",
            "--mem-fraction-static": "0.3",
            "--kv-events-config": json.dumps(events),
            **self._model.options,
        }
        flags = ("--disable-overlap-schedule", "--skip-server-warmup", "--enable-cache-report")
        named = [word for option in options.items() for word in option if word]
        return [PYTHON, "-m", "sglang.launch_server", *named, *flags]
