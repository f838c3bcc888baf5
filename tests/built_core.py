"""Checks that the compiled core is up to date with its sources."""

from importlib.util import find_spec
from pathlib import Path

NATIVE = Path(__file__).resolve().parent.parent / "kvstate" / "native"


def stale_core(core: Path | None, native: Path = NATIVE) -> str:
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


def installed_core() -> Path | None:
    """The compiled core that is imported, or None."""
    found = find_spec("kvstate._core")
    return Path(found.origin) if found and found.origin else None
