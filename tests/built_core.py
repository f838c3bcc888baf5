"""Checks that the compiled cores are up to date with their sources."""

from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def stale_core(core: Path | None, native: Path) -> str:
    """Returns what to do if the compiled core is older than one of its sources, else ""."""
    if core is None:
        return ""
    built = core.stat().st_mtime
    newer = sorted(file.name for file in native.glob("*.[ch]") if file.stat().st_mtime > built)
    if not newer:
        return ""
    return (
        f"the compiled core {core.name} is older than {', '.join(newer)} in {native.name}/:"
        " build it again with `python setup.py build_ext --inplace`"
    )


def stale_cores() -> str:
    """Returns what to do if one of the imported cores is older than its sources, else ""."""
    complaints = [
        stale_core(_imported(one), ROOT / one / "native") for one in ("kvstate", "extproc")
    ]
    return "\n".join(filter(None, complaints))


def _imported(package: str) -> Path | None:
    found = find_spec(f"{package}._core")
    return Path(found.origin) if found and found.origin else None
