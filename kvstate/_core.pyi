from kvstate.core import Core
from kvstate.overlap import Overlap

def CompiledCore(secret: int, limit_blocks: int, overlap: type[Overlap], /) -> Core: ...  # noqa: N802
