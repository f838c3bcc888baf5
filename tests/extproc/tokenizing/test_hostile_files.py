"""What a hostile model's files can do at the start: be refused by name, soon.

Those that take time or memory are loaded by a process of its own, which reports what they took.
"""

import json
import os
import shutil
import time
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from extproc.base.errors import StartError
from extproc.base.tokenizer_files import MAX_FILE_BYTES, read_file
from extproc.config.schema import Model
from extproc.tokenizing.byte_pairs import MAX_TOKEN_BYTES, MAX_TOKENS
from extproc.tokenizing.tokens import Tokenizer
from kvtools.simulator.settings import TINY_MODEL
from tests.extproc.small_models import write_model
from tests.limited import limited

# What may take MAX_CPU_SECONDS takes many times as long on a busy machine.
SECONDS = 500


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"]
)
def test_sparse_file_of_two_gigabytes_is_refused_by_name(name: str, tmp_path: Path) -> None:
    model = Path(shutil.copytree(TINY_MODEL, tmp_path / "model"))
    with (model / name).open("wb") as file:
        file.truncate(2 << 30)
    with pytest.raises(StartError, match=rf"/{name} is larger than"):
        Tokenizer.load(Model("m", tokenizer=str(model)))


# Vocabularies that are converted, and the files that each needs beside it.
VOCABULARIES: dict[str, list[str]] = {
    "tekken.json": [],
    "tokenizer.model.v7": [],
    "tokenizer.model": [],
    "tiktoken.model": [],
    "tokenization_kimi.py": ["tiktoken.model"],
    "vocab.json": ["merges.txt"],
    "merges.txt": ["vocab.json"],
}


@pytest.mark.parametrize("name", VOCABULARIES)
def test_vocabulary_of_ten_gigabytes_is_refused_by_name(name: str, tmp_path: Path) -> None:
    for other in VOCABULARIES[name]:
        (tmp_path / other).write_text("{}")
    with (tmp_path / name).open("wb") as file:
        file.truncate(10 << 30)
    assert f"/{name} is larger than" in loaded(tmp_path)


RUNS = [bytes([letter]) * times for letter in range(97, 112) for times in range(2, MAX_TOKEN_BYTES)]
# Half as many as are allowed are more than any model has; all may take a slow machine too long.
ALL = [b"%07daaaa" % number for number in range(MAX_TOKENS - 256)]
MANY = ALL[: MAX_TOKENS // 2]


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (RUNS, "made of others in too many ways"),
        (RUNS[:300], ""),
        pytest.param(MANY, "", marks=pytest.mark.slow),
    ],
    ids=["runs", "runs within the limit", "more than any model has"],
)
def test_large_vocabulary_ends_in_time(tokens: list[bytes], reason: str, tmp_path: Path) -> None:
    write_model("kimi-k2", tmp_path)
    ranks = [*(bytes([number]) for number in range(256)), *tokens]
    lines = [f"{b64encode(one).decode()} {rank}" for rank, one in enumerate(ranks)]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    error = loaded(tmp_path)
    assert bool(error) == bool(reason)
    assert reason in error


@pytest.mark.slow
def test_vocabulary_of_all_allowed_tokens_loads_or_is_refused_by_its_limit(tmp_path: Path) -> None:
    write_model("kimi-k2", tmp_path)
    ranks = [*(bytes([number]) for number in range(256)), *ALL]
    lines = [f"{b64encode(one).decode()} {rank}" for rank, one in enumerate(ranks)]
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    error = loaded(tmp_path)
    assert not error or error.endswith("it takes more than 20 s of CPU")


def test_pipe_as_a_template_is_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StartError, match="/pipe is not a regular file"):
        Tokenizer.load(Model("m", tokenizer=str(TINY_MODEL), chat_template=str(tmp_path / "pipe")))


def test_read_file_refuses_oversized_files_and_devices(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"abc")
    assert read_file(tmp_path / "file", 3) == b"abc"
    with pytest.raises(ValueError, match="larger than 2 bytes"):
        read_file(tmp_path / "file", 2)
    (tmp_path / "link").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="not a regular file"):
        read_file(tmp_path / "link", MAX_FILE_BYTES)


Change = Callable[[dict[str, Any]], None]


def added(count: int, characters: int = 8) -> Change:
    """Adds as many tokens of this length."""

    def change(tokenizer: dict[str, Any]) -> None:
        tokenizer["added_tokens"] += [
            {
                "id": 1_000_000 + number,
                "content": f"<{number:0{characters - 2}}>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number in range(count)
        ]

    return change


def split_at(pattern: str) -> Change:
    """Splits texts at what matches a pattern."""

    def change(tokenizer: dict[str, Any]) -> None:
        tokenizer["pre_tokenizer"] = {
            "type": "Split",
            "pattern": {"Regex": pattern},
            "behavior": "Isolated",
            "invert": False,
        }

    return change


MAX_CPU_SECONDS = 30.0
MAX_MEBIBYTES = 768

# What is changed in a tokenizer.json, and why it is refused, "" where it is loaded.
TOKENIZERS: dict[str, tuple[Change, str]] = {
    "tokens": (added(150_000), "more than 131072 added tokens"),
    "twice as many tokens": (added(300_000), "more than 131072 added tokens"),
    "tokens within the limit": (added(100_000), ""),
    "a long token": (added(1, 1_000_000), "an added token of more than 1024 characters"),
    "long tokens": (added(1_000, 1_024), ""),
    "a pattern that gives up": (split_at("(a+)+[bc]"), "retry-limit-in-match"),
    "a slow pattern": (
        split_at(r"\w{1,160}\w{1,160}\w{1,250}(?!\w|$)"),
        "it takes more than 20 s of CPU",
    ),
}
SLOW = {"twice as many tokens", "tokens within the limit", "a slow pattern"}

# Files of a model's directory, and why they are refused.
LONG_TEMPLATE = "x" * 8_000_000
LONG = "chat templates of more than 1048576 characters"
TEMPLATES: dict[str, tuple[str, str, str]] = {
    "in settings": ("tokenizer_config.json", json.dumps({"chat_template": LONG_TEMPLATE}), LONG),
    "of a processor": ("chat_template.json", json.dumps({"chat_template": LONG_TEMPLATE}), LONG),
    "many in settings": (
        "tokenizer_config.json",
        json.dumps(
            {"chat_template": [{"name": str(n), "template": f"{n}" * 9_000} for n in range(999)]}
        ),
        LONG,
    ),
    "of many words": ("chat_template.jinja", "{{x}}" * 200_000, "more than 32768 words and marks"),
}


def loaded(folder: Path) -> str:
    """Loads a model in a process of its own; returns why it was refused."""
    found = limited(load, str(folder), gibibytes=6, cpu_seconds=120, wait_seconds=SECONDS)
    assert found["seconds"] < MAX_CPU_SECONDS, found
    assert found["mebibytes"] < MAX_MEBIBYTES, found
    error: str = found["error"]
    return error


def load(folder: str) -> dict[str, Any]:
    """Returns how a model is loaded: why it is refused, CPU seconds, the most MiB in use."""
    error = ""
    began = time.process_time()
    try:
        Tokenizer.load(Model("m", tokenizer=folder))
    except StartError as refused:
        error = str(refused)
    seconds = time.process_time() - began
    # not getrusage's figure, which begins with what the process that started this one had
    status = Path("/proc/self/status").read_text()
    mebibytes = int(status.partition("VmHWM:")[2].split()[0]) // 1024
    return {"error": error, "seconds": seconds, "mebibytes": mebibytes}


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=pytest.mark.slow) if one in SLOW else one for one in TOKENIZERS],
)
def test_hostile_tokenizer_ends_in_time_and_is_named(name: str, tmp_path: Path) -> None:
    change, reason = TOKENIZERS[name]
    model = Path(shutil.copytree(TINY_MODEL, tmp_path / "model"))
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    change(tokenizer)
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    error = loaded(model)
    assert bool(error) == bool(reason)
    assert reason in error
    assert not reason or f"{model}/tokenizer.json: " in error


@pytest.mark.parametrize("name", TEMPLATES)
def test_hostile_template_file_is_refused_by_name(name: str, tmp_path: Path) -> None:
    file, content, reason = TEMPLATES[name]
    model = Path(shutil.copytree(TINY_MODEL, tmp_path / "model"))
    (model / "chat_template.jinja").unlink(missing_ok=True)
    (model / file).write_text(content)
    error = loaded(model)
    assert f"{model}/{file}: " in error
    assert reason in error


@pytest.mark.parametrize(
    ("reference", "error"),
    [(b"a" * 2**20, "larger than 256 bytes"), (b"../..", "no revision"), (b"\xff", "no revision")],
    ids=["huge", "above", "no text"],
)
def test_hostile_reference_of_the_cache_is_refused_by_name(
    reference: bytes, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refs = tmp_path / "models--org--name" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_bytes(reference)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(StartError, match=rf"{refs}/main .*{error}"):
        Tokenizer.load(Model("m", tokenizer="org/name"))
