"""A digest of all that decides the tokens of a model here: its files, and this release's code."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import xxhash

from extproc.base.tokenizer_files import MAX_FILE_BYTES, TokenizerFiles, read_file
from extproc.config.schema import Model

# More files than a model's directory has besides its weights.
MAX_FILES = 1_000

# Weights decide no token.
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".onnx", ".h5", ".msgpack")


def digest_of(model: Model, release: str) -> bytes | None:
    """Returns a digest of a model's files and of the release that reads them.

    None if the model names no files, or they cannot be read. Blocks: it reads the files.
    """
    if not isinstance(model.tokenizer, str):
        return None
    digest = xxhash.xxh3_128(repr((release, model)).encode())
    try:
        files = [*_files(TokenizerFiles.find(model.tokenizer).directory)]
        if model.chat_template is not None:
            files.append(Path(model.chat_template))
        for file in files:
            content = read_file(file)
            digest.update(repr((file.name, len(content))).encode())
            digest.update(content)
    except (OSError, ValueError):
        return None
    return digest.digest()


def _files(directory: Path) -> Iterator[Path]:
    """Yields the small regular files of a directory and its folders, in order of their paths.

    Raises:
        ValueError: there are too many.
    """
    found = [
        Path(folder) / name
        for folder, _, names in os.walk(directory)
        for name in names
        if not name.endswith(_WEIGHTS)
    ]
    if len(found) > MAX_FILES:
        raise ValueError(f"{directory} has more than {MAX_FILES} files")
    for path in sorted(found):
        about = path.stat()
        if stat.S_ISREG(about.st_mode) and about.st_size <= MAX_FILE_BYTES:
            yield path
