"""Where a model's tokenizer and chat template lie on this machine."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """The files of one tokenizer; all but tokenizer.json may be absent."""

    tokenizer: Path
    config: Path | None
    template: Path | None

    @classmethod
    def find(cls, source: str) -> "TokenizerFiles":
        """Finds them by a directory, a tokenizer.json, or a hub id in the local cache.

        Raises:
            FileNotFoundError: with where was looked.
        """
        directory = Path(source)
        if directory.is_file():
            return cls._beside(directory)
        if not directory.is_dir():
            directory = _cached_snapshot(source)
        tokenizer = directory / "tokenizer.json"
        if not tokenizer.is_file():
            raise FileNotFoundError(f"no tokenizer.json in {directory}")
        return cls._beside(tokenizer)

    @classmethod
    def _beside(cls, tokenizer: Path) -> "TokenizerFiles":
        config = tokenizer.with_name("tokenizer_config.json")
        template = tokenizer.with_name("chat_template.jinja")
        return cls(
            tokenizer,
            config if config.is_file() else None,
            template if template.is_file() else None,
        )


def _cached_snapshot(hub_id: str) -> Path:
    """The revision that `main` names in the local Hugging Face cache."""
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    repository = cache / f"models--{hub_id.replace('/', '--')}"
    reference = repository / "refs" / "main"
    if ".." in hub_id or not reference.is_file():
        raise FileNotFoundError(f"{hub_id!r} is no directory or file, and not in {cache}")
    return repository / "snapshots" / reference.read_text().strip()
