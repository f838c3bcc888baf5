"""Which modules of the request path run compiled: those that `compile_path.py` built, if it did.

They lie apart from the sources, in `extproc/compiled/`, and are taken only as a whole, and only as
long as they were built from the very sources that are here, for this Python: whoever edits one runs
plain Python from then on, until it is compiled again. KVSTEER_REQUEST_PATH=plain leaves them alone.
"""

import hashlib
import importlib
import json
import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any, NamedTuple

_HERE = Path(__file__).resolve().parent


class Choice(NamedTuple):
    """What runs: is_compiled, or else why not, which is "" where nothing was compiled."""

    is_compiled: bool
    reason: str = ""

    @property
    def name(self) -> str:
        """Returns it in a word: compiled or plain."""
        return "compiled" if self.is_compiled else "plain"

    def __str__(self) -> str:
        return f"{self.name}: {self.reason}" if self.reason else self.name


def chosen(environment: str | None, here: Path = _HERE) -> Choice:
    """Returns what is to run. environment: what KVSTEER_REQUEST_PATH says, None if nothing."""
    manifest = _manifest(here)
    if manifest is None:
        return Choice(is_compiled=False)
    if environment == "plain":
        return Choice(is_compiled=False, reason="KVSTEER_REQUEST_PATH says so")
    if manifest["suffix"] not in EXTENSION_SUFFIXES:
        return Choice(is_compiled=False, reason="compiled for another Python")
    for name, digest in manifest["sources"].items():
        source = here.parent / name
        if not source.is_file() or hashlib.sha256(source.read_bytes()).hexdigest() != digest:
            return Choice(is_compiled=False, reason=f"{name} has changed since it was compiled")
    return Choice(is_compiled=True)


def take(choice: Choice, here: Path = _HERE) -> None:
    """Has Python find the compiled modules before their sources, if they are to run."""
    if not choice.is_compiled:
        return
    compiled = here / "compiled"
    importlib.import_module("extproc").__path__.insert(0, str(compiled))
    for folder in sorted(one.name for one in compiled.iterdir() if one.is_dir()):
        importlib.import_module(f"extproc.{folder}").__path__.insert(0, str(compiled / folder))


def _manifest(here: Path) -> Any:  # noqa: ANN401 - JSON
    try:
        return json.loads((here / "compiled" / "manifest.json").read_text())
    except FileNotFoundError:
        return None


CHOICE = chosen(os.environ.get("KVSTEER_REQUEST_PATH"))
