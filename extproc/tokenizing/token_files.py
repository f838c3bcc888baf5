"""Reads the JSON files beside a model's vocabulary that say how engines load it."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from extproc.base.tokenizer_files import read_file


class SettingsFiles(NamedTuple):
    """What the small files of a model's directory hold.

    settings: tokenizer_config.json. config: config.json; both {} if there is none. special_map:
    special_tokens_map.json. listed: added_tokens.json; both None if there is none.
    """

    settings: dict[str, Any]
    config: dict[str, Any]
    special_map: dict[str, Any] | None
    listed: dict[str, Any] | None

    @classmethod
    def read(cls, directory: Path) -> "SettingsFiles":
        """Reads them.

        Raises:
            OSError: a file cannot be read. ValueError: it holds no JSON object; names the file.
        """
        return cls(
            _object(directory / "tokenizer_config.json") or {},
            _object(directory / "config.json") or {},
            _object(directory / "special_tokens_map.json"),
            _object(directory / "added_tokens.json"),
        )


def object_in(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file, {} if there is no such file.

    Raises:
        OSError: it cannot be read. ValueError: it holds something else; names the file.
    """
    return _object(path) or {}


def _object(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        value = json.loads(read_file(path))
    except RecursionError:
        raise ValueError(f"{path.name}: nested too deeply") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path.name}: no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name}: not a JSON object")
    return value
