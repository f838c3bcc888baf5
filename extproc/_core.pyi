from typing import Any, Protocol

from extproc.http2.session import Session, SharedBudget

def CompiledBudget(max_bytes: int, /) -> SharedBudget: ...  # noqa: N802
def CompiledSession(  # noqa: N802
    limits: tuple[int, ...], max_message_bytes: int, budget: SharedBudget, /
) -> Session: ...

class _Decoder(Protocol):
    def decode(self, message: bytes, /) -> Any: ...

def CompiledDecoder(record: type, names: tuple[str, ...], /) -> _Decoder: ...  # noqa: N802
