"""Finds the files of a model's tokenizer on this machine."""

import errno
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

# Most bytes of a model's file that is read; the largest tokenizers take 35 MB.
MAX_FILE_BYTES = 64 * 1024 * 1024

# Most bytes of a chat template, which is compiled.
MAX_TEMPLATE_BYTES = 1024 * 1024

# Most bytes of a reference in the cache, which is a commit's hash.
MAX_REFERENCE_BYTES = 256

# What is converted if there is no tokenizer.json, the first that is there. `mistral` has its own.
_CONVERTIBLE = ("tiktoken.model", "tokenizer.model", "vocab.json")

_REVISION = re.compile(r"[\w.-]+")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The path of a model's vocabulary; its other small files are in the same directory.

    tokenizer: a tokenizer.json, or a file that can be converted (`extproc.tokenizing.vocabulary`).
    """

    tokenizer: Path

    @property
    def directory(self) -> Path:
        """The directory with tokenizer_config.json and the chat templates."""
        return self.tokenizer.parent

    @property
    def mistral(self) -> Path | None:
        """The vocabulary of Mistral's own library, None if there is none.

        Source: mistral-common 1.13 (tokens/tokenizers/utils.py): of several files tekken.json, else
        the last one.
        """
        tekken = self.directory / "tekken.json"
        if tekken.is_file():
            return tekken
        found = sorted(self.directory.glob("tokenizer.model.v*"))
        return found[-1] if found and found[-1].is_file() else None

    def chosen(self, mode: str) -> Path:
        """Returns the vocabulary that an engine uses.

        mode: vLLM's --tokenizer-mode. With "auto" it takes Mistral's own vocabulary where the
            weights are in Mistral's format. Where none are here, its vocabulary is taken, since
            what is tokenized so counts only once it is proved.

        Raises:
            ValueError: the mode needs a file that is not there.

        Source: vLLM 0.32 (tokenizers/registry.py, transformers_utils/repo_utils.py).
        """
        mistral = self.mistral
        if mode == "mistral":
            if mistral is None:
                raise ValueError("tokenizer_mode is mistral, but there is no tekken.json")
            return mistral
        if mode == "hf" or mistral is None or self.tokenizer == mistral:
            return self.tokenizer
        weights = [file.name for file in self.directory.glob("*.safetensors")]
        is_mistrals = any(name.startswith("consolidated") for name in weights)
        return mistral if is_mistrals or not weights else self.tokenizer

    @classmethod
    def find(cls, source: str) -> "TokenizerFiles":
        """Finds the files by a directory, a vocabulary, or a hub id in the local cache.

        Raises:
            FileNotFoundError: they are not there; says where it looked.
            PermissionError: this process may not read them.
            ValueError: the cache's reference to the revision is none.
        """
        tokenizer = Path(source)
        if not tokenizer.is_file():
            directory = tokenizer if tokenizer.is_dir() else _cached_snapshot(source)
            tokenizer = cls._vocabulary(directory)
        if not os.access(tokenizer, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tokenizer))
        return cls(tokenizer)

    @classmethod
    def _vocabulary(cls, directory: Path) -> Path:
        tokenizer = directory / "tokenizer.json"
        if tokenizer.is_file():
            return tokenizer
        others = [cls(tokenizer).mistral, *(directory / name for name in _CONVERTIBLE)]
        for found in others:
            if found is not None and found.is_file():
                return found
        raise FileNotFoundError(f"no tokenizer.json in {directory}, and nothing to make one of")


def read_file(path: Path, most: int = MAX_FILE_BYTES) -> bytes:
    """Returns the content of a regular file, to which a link may lead.

    most: bytes.

    Raises:
        OSError: it cannot be read. ValueError: it is something else, such as a pipe, or is larger.
    """
    # a pipe that nobody writes to would be opened for ever
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path} is not a regular file")
        if os.fstat(file.fileno()).st_size <= most:
            found = file.read(most + 1)
            if len(found) <= most:
                return found
    raise ValueError(f"{path} is larger than {most} bytes")


def _cached_snapshot(hub_id: str) -> Path:
    """Returns the directory of the revision `main` in the local Hugging Face cache.

    Raises:
        FileNotFoundError, ValueError: as `TokenizerFiles.find`.
    """
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    reference = repository / "refs" / "main"
    if ".." in hub_id or not reference.is_file():
        raise FileNotFoundError(f"{hub_id!r} is no directory or file{_cure(hub_id, cache)}")
    revision = read_file(reference, MAX_REFERENCE_BYTES).decode(errors="replace").strip()
    if not _REVISION.fullmatch(revision) or ".." in revision:
        raise ValueError(f"{reference} names no revision")
    return repository / "snapshots" / revision


def _cure(source: str, cache: Path) -> str:
    asks = "{remote: true} asks the workers instead"
    if source == "remote":
        return "; did you mean {remote: true}, which asks the workers?"
    if _HUB_ID.fullmatch(source) and not source.startswith("."):
        return f", and not in {cache}: `hf download {source}` fetches it; {asks}"
    return f", and no hub id in {cache}; {asks}"
