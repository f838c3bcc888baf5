"""Which core runs: the compiled one where it was built, else the plain one."""

from kvstate.core import Core
from kvstate.overlap import Overlap
from kvstate.plain_core import PlainCore

try:
    from kvstate._core import CompiledCore
except ImportError:  # there was no C compiler at installation
    IS_COMPILED = False
else:
    IS_COMPILED = True


def make_core(secret: int, limit_blocks: int, *, compiled: bool | None = None) -> Core:
    """A core; compiled None takes the compiled one where it was built.

    Raises:
        RuntimeError: the compiled one is wanted and was not built.
    """
    if compiled and not IS_COMPILED:
        raise RuntimeError("the compiled core was not built: there was no C compiler")
    if compiled or (compiled is None and IS_COMPILED):
        return CompiledCore(secret, limit_blocks, Overlap)
    return PlainCore(secret, limit_blocks, Overlap)


def plain_core_warning() -> str:
    """What to do about a compiled core that is missing, "" where it is there."""
    if IS_COMPILED:
        return ""
    return (
        "there was no C compiler when kvsteer was installed: the plain-Python index core runs,"
        " which takes several times the CPU and memory; install gcc, then kvsteer again with"
        " pip install --force-reinstall --no-cache-dir"
    )


def default_core_name() -> str:
    """Which core runs where none is asked for: compiled or plain."""
    return "compiled" if IS_COMPILED else "plain"
