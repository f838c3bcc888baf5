"""Runs Python as on a machine where its headers are not installed."""

from pathlib import Path

_HIDDEN = """
import sysconfig
found = sysconfig.get_path
sysconfig.get_path = lambda name, *more: "/nowhere" if name == "include" else found(name, *more)
"""


def without_headers(folder: Path) -> str:
    """Returns a PYTHONPATH with which Python looks for its headers where there are none."""
    (folder / "sitecustomize.py").write_text(_HIDDEN)
    return str(folder)
