from kvstate.core import Core
from kvstate.overlap import Overlap

LAYOUT: int

def CompiledCore(secret: int, limit_blocks: int, overlap: type[Overlap], /) -> Core: ...  # noqa: N802
def marks(body: bytes, /) -> tuple[int, int, int]: ...
def sizes(written: bytes, /) -> tuple[int, int]: ...
def marks_outside(body: bytes, max_quotes: int, /) -> tuple[int, int, int]: ...
def members(
    body: bytes,
    start: int,
    end: int,
    names: bytes,
    walked: int,
    parts: bytes,
    depth: int,
    /,
) -> tuple[tuple[tuple[int, int, int, int, int], ...], int, int, bool] | int: ...
def braces(body: bytes, /) -> tuple[int, bool] | None: ...
def splice(body: bytes, edits: tuple[tuple[int, int, bytes], ...], /) -> bytes: ...
