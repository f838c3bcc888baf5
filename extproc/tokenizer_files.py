"""Finds the files of a model's tokenizer on this machine."""

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The path of a tokenizer.json; the model's other small files are in the same directory."""

    tokenizer: Path

    @property
    def directory(self) -> Path:
        """Returns the directory with tokenizer_config.json and the chat templates."""
        return self.tokenizer.parent

    @classmethod
    def find(cls, source: str) -> "TokenizerFiles":
        """Finds the files by a directory, a tokenizer.json, or a hub id in the local cache.

        Raises:
            FileNotFoundError: they are not there; says where it looked.
            PermissionError: this process may not read them.
        """
        tokenizer = Path(source)
        if not tokenizer.is_file():
            directory = tokenizer if tokenizer.is_dir() else _cached_snapshot(source)
            tokenizer = directory / "tokenizer.json"
            if not tokenizer.is_file():
                raise FileNotFoundError(f"no tokenizer.json in {directory}")
        if not os.access(tokenizer, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(tokenizer))
        return cls(tokenizer)


def _cached_snapshot(hub_id: str) -> Path:
    """Returns the directory of the revision `main` in the local Hugging Face cache."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    reference = repository / "refs" / "main"
    if ".." in hub_id or not reference.is_file():
        raise FileNotFoundError(f"{hub_id!r} is no directory or file{_cure(hub_id, cache)}")
    return repository / "snapshots" / reference.read_text().strip()


def _cure(source: str, cache: Path) -> str:
    asks = "{remote: true} asks the workers instead"
    if source == "remote":
        return "; did you mean {remote: true}, which asks the workers?"
    if _HUB_ID.fullmatch(source) and not source.startswith("."):
        return f", and not in {cache}: `hf download {source}` fetches it; {asks}"
    return f", and no hub id in {cache}; {asks}"
