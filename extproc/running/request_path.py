"""Chooses between the compiled request path, if `compile_path.py` built it, and plain Python.

The compiled modules are in `extproc/compiled/`. Either all of them are used or none, and only if
they were built for this Python from exactly these sources: after an edit, plain Python runs until
they are compiled again. KVSTEER_REQUEST_PATH=plain switches them off.
"""

import hashlib
import importlib
import json
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple

_HERE = Path(__file__).resolve().parents[1]  # the folder `extproc`


class CompiledChoice(NamedTuple):
    """Whether the compiled modules run, and if not, why; the reason is "" if none were built."""

    is_compiled: bool
    reason: str = ""

    @property
    def name(self) -> str:
        """Returns compiled or plain."""
        return "compiled" if self.is_compiled else "plain"

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" if self.reason else self.name


def chosen(environment: str | None, here: Path = _HERE) -> CompiledChoice:
    """Returns the choice. environment: the value of KVSTEER_REQUEST_PATH, None if not set."""
    manifest = _manifest(here)
    if manifest is None:
        return CompiledChoice(is_compiled=False)
    if environment == "plain":
        return CompiledChoice(is_compiled=False, reason="KVSTEER_REQUEST_PATH is set to plain")
    if manifest["suffix"] not in EXTENSION_SUFFIXES:
        return CompiledChoice(is_compiled=False, reason="compiled for another Python")
    for name, digest in manifest["sources"].items():
        source = here.parent / name
        if not source.is_file() or hashlib.sha256(source.read_bytes()).hexdigest() != digest:
            return CompiledChoice(
                is_compiled=False, reason=f"{name} has changed since it was compiled"
            )
    return CompiledChoice(is_compiled=True)


def take(choice: CompiledChoice, here: Path = _HERE) -> None:
    """Makes Python find the compiled modules before their sources, if they are chosen."""
    if not choice.is_compiled:
        return
    compiled = here / "compiled"
    importlib.import_module("extproc").__path__.insert(0, str(compiled))
    for folder in sorted(one.name for one in compiled.iterdir() if one.is_dir()):
        importlib.import_module(f"extproc.{folder}").__path__.insert(0, str(compiled / folder))


def _manifest(here: Path) -> Any:
    try:
        return json.loads((here / "compiled" / "manifest.json").read_text())
    except FileNotFoundError:
        return None


CHOICE = chosen(os.environ.get("KVSTEER_REQUEST_PATH"))
