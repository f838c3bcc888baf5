"""Checks that the compiled cores are there, and up to date with their sources."""

from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = "build it with `python setup.py build_ext --inplace`"


def stale_core(core: Path | None, native: Path) -> str:
    """Returns what to do if a core is missing or older than one of its sources, else ""."""
    if core is None:
        return f"the compiled core of {native.parent.name} is missing: {BUILD}"
    built = core.stat().st_mtime
    newer = sorted(file.name for file in native.glob("*.[ch]") if file.stat().st_mtime > built)
    if not newer:
        return ""
    return (
        f"the compiled core {core.name} is older than {', '.join(newer)} in {native.name}/: {BUILD}"
    )


def stale_cores() -> str:
    """Returns what to do if an imported core is missing or older than its sources, else ""."""
    complaints = [
        stale_core(_imported(one), ROOT / one / "native") for one in ("kvstate", "extproc")
    ]
    return "\n".join(filter(None, complaints))


def _imported(package: str) -> Path | None:
    found = find_spec(f"{package}._core")
    return Path(found.origin) if found and found.origin else None
