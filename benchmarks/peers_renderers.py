"""CPU of the two renderers that llm-d's picker can ask for tokens: vLLM's in Python and in Rust.

The Python one is peers_render.py, which renders and tokenizes as vLLM does; the Rust one is
`vllm-rs render` of vLLM's wheel (0.33: vllm/vllm-rs, which needs no engine and no GPU), named by
KVSTEER_VLLM_RS. Both get the same chats, one after the other, in turn.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from extproc_contestants import post
from extproc_load import conversations
from extproc_parts import HERE, TINY_MODEL, Process, free_address, running
from measure import CannotRunError, Figure, Row
from peers_contestants import SHAPE

SIZES = (2, 32, 128)
RENDER = "/v1/chat/completions/render"


def renderers(rounds: int) -> list[Row]:
    """Returns a row for each size: microseconds of CPU a request, Rust's beside Python's."""
    with tempfile.TemporaryDirectory(prefix="kvsteer-bench-") as name, ExitStack() as stack:
        directory = Path(name)
        in_rust = _rust(stack, directory)
        in_python = _python(stack, directory)
        rows = []
        for size in SIZES:
            requests = [_without_empty(one) for one in conversations(size)]
            found = [(_cpu(in_rust, requests), _cpu(in_python, requests)) for _ in range(rounds)]
            rust, python = (Figure(values) for values in zip(*found[1:] or found, strict=True))
            rows.append(Row(f"renderer's us, Rust / Python, {size} KB", rust, python))
        return rows


def _without_empty(request: dict[str, Any]) -> dict[str, Any]:
    """Returns a chat in which each turn has a text: the Rust front end refuses it otherwise."""
    messages = [one | {"content": one["content"] or "Hello."} for one in request["messages"]]
    return request | {"messages": messages}


def _rust(stack: ExitStack, directory: Path) -> tuple[str, str, Process]:
    program = os.environ.get("KVSTEER_VLLM_RS")
    if not program:
        raise CannotRunError("did not run: KVSTEER_VLLM_RS names no vllm-rs")
    model = directory / "model"
    shutil.copytree(TINY_MODEL, model)
    (model / "config.json").write_text(json.dumps(SHAPE))  # with room for the longest chat
    address = free_address()
    ip, _, port = address.rpartition(":")
    command = [program, "render", str(model), "--host", ip, "--port", port]
    process = stack.enter_context(
        running(command, directory / "rust.log", f"http://{address}/health")
    )
    return f"http://{address}", str(model), process


def _python(stack: ExitStack, directory: Path) -> tuple[str, str, Process]:
    address = free_address()
    command = [sys.executable, str(HERE / "peers_render.py"), address]
    log = directory / "python.log"
    process = stack.enter_context(running(command, log, f"http://{address}/health"))
    return f"http://{address}", "tiny", process


def _cpu(renderer: tuple[str, str, Process], requests: Sequence[dict[str, object]]) -> float:
    url, model, process = renderer
    before = process.cpu_seconds()
    for request in requests:
        assert post(url, RENDER, request | {"model": model})["token_ids"]
    return (process.cpu_seconds() - before) / len(requests) * 1e6
