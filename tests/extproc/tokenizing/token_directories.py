"""Directories of tokenizers whose files disagree, and what releases of transformers load from them.

`python -m tests.extproc.tokenizing.token_directories PYTHON...` records that anew, in
token_directories.json; each PYTHON is the interpreter of a release (4.57.1 and 5.20.2).
"""

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models

from extproc.tokenizing.added_tokens import KINDS
from tests.extproc.tokenizing import library_loading
from tests.extproc.tokenizing.library_loading import FLAGS

RECORDED = Path(__file__).with_name("token_directories.json")

VOCABULARY = {"a": 0, "b": 1, "ab": 2, "c": 3, "<b>": 4, "<": 5, ">": 6, "<|endoftext|>": 7}
TEXTS = ("<a>", "<b>", "<c>", "<d>", "ab", "<|endoftext|>", "<unk>", "<s>", "</s>")
ASKED = "".join(f"a {text} b{text}\n" for text in TEXTS)
CLASSES = (
    None,
    "PreTrainedTokenizerFast",
    "TokenizersBackend",
    "CohereTokenizer",
    "GPT2Tokenizer",
    "GPTNeoXTokenizer",
    "GemmaTokenizer",
    "LlamaTokenizer",
    "Qwen2Tokenizer",
    "Qwen3_5Tokenizer",
)
TYPES = ("qwen2", "llama", "gpt2", "cohere", "gemma", "gpt_neox", "mixtral")

# The files of a directory by their names; of tokenizer.json only the added tokens.
Files = dict[str, Any]


def files_by_chance(chances: random.Random) -> Files:
    """Files that name few tokens in many ways; half of them are of a class that keeps the file."""
    settings = _settings(chances)
    is_kept = chances.random() < 0.5
    kind = "PreTrainedTokenizerFast" if is_kept else chances.choice(CLASSES)
    settings |= {"tokenizer_class": kind} if kind else {}
    if chances.random() < 0.5:
        texts = _some(chances, TEXTS, 4)
        ids = chances.sample(range(20), len(texts))
        entries = [{"content": text, **_flags(chances)} for text in texts]
        settings["added_tokens_decoder"] = dict(zip(map(str, ids), entries, strict=True))
    files: Files = {
        "tokenizer.json": [
            {"content": text, **dict.fromkeys(FLAGS, False), **_flags(chances)}
            for text in _some(chances, TEXTS, 4)
        ],
        "tokenizer_config.json": settings,
        "config.json": {} if is_kept else {"model_type": chances.choice(TYPES)},
    }
    if chances.random() < 0.5:
        files["special_tokens_map.json"] = _settings(chances)
    if chances.random() < 0.5:
        listed = {text: chances.randint(0, 30) for text in _some(chances, TEXTS, 3)}
        files["added_tokens.json"] = listed
    return files


def _settings(chances: random.Random) -> dict[str, Any]:
    found = {name: _special(chances) for name in _some(chances, KINDS, 3)}
    if chances.random() < 0.4:
        found["additional_special_tokens"] = _specials(chances)
    if chances.random() < 0.25:
        named = {"think_token": chances.choice(TEXTS)}
        found["extra_special_tokens"] = chances.choice([named, _specials(chances)])
    if chances.random() < 0.2:
        found["image_token"] = _special(chances)
    return found


def _some(chances: random.Random, of: Sequence[str], most: int) -> list[str]:
    return chances.sample(of, chances.randint(0, most))


def _specials(chances: random.Random) -> list[Any]:
    return [_special(chances) for _ in range(chances.randint(0, 3))]


def _special(chances: random.Random) -> Any:
    if chances.random() < 0.8:
        return chances.choice(TEXTS)
    mark = {"__type": "AddedToken"} if chances.random() < 0.7 else {}
    token = {"content": chances.choice(TEXTS), **_flags(chances), **mark}
    return chances.choice([token, token, token, None])


def _flags(chances: random.Random) -> dict[str, bool]:
    return {flag: chances.random() < 0.4 for flag in FLAGS if chances.random() < 0.6}


def write(directory: Path, files: Files) -> None:
    """Writes the files of a directory."""
    directory.mkdir()
    library = tokenizers.Tokenizer(models.BPE(vocab=VOCABULARY, merges=[("a", "b")]))
    library.add_tokens([tokenizers.AddedToken(**one) for one in files["tokenizer.json"]])
    library.save(str(directory / "tokenizer.json"))
    for name, value in files.items():
        if name != "tokenizer.json":
            (directory / name).write_text(json.dumps(value))


def loaded_by(python: str, directories: Iterable[Path]) -> list[dict[str, Any]]:
    """What the transformers of another interpreter loads from directories."""
    quiet = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical"}
    told = subprocess.run(
        [python, "-W", "ignore", library_loading.__file__, ASKED],
        input="\n".join(map(str, directories)),
        env={**os.environ, **quiet},
        capture_output=True,
        check=True,
        text=True,
    )
    return [json.loads(line) for line in told.stdout.splitlines() if line.startswith("{")]


def written(root: Path, several: Iterable[Files]) -> list[Path]:
    """The directories of several files, written below a root."""
    made = []
    for number, files in enumerate(several):
        made.append(root / str(number))
        write(made[-1], files)
    return made


def record(pythons: Sequence[str], count: int = 100) -> None:
    """Writes RECORDED."""
    several = [files_by_chance(random.Random(seed)) for seed in range(count)]
    with tempfile.TemporaryDirectory() as root:
        directories = written(Path(root), several)
        found = [loaded_by(python, directories) for python in pythons]
    rows = [{"files": files, "loaded": some} for files, *some in zip(several, *found, strict=True)]
    RECORDED.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")


if __name__ == "__main__":
    record(sys.argv[1:])
