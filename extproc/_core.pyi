from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

from extproc.http2.limits import SharedBudget
from extproc.http2.reading import Reading
from extproc.http2.session import Session
from extproc.routing.claim_table import Expected, Lifetimes, PlainMarkTable
from extproc.routing.load import Rates
from extproc.routing.load_columns import LoadColumns
from extproc.routing.load_numbers import PlainNumbers, PlainPace
from kvstate.overlap import Tokens

def CompiledBudget(max_bytes: int, /) -> SharedBudget: ...  # noqa: N802
def CompiledSession(  # noqa: N802
    limits: tuple[int, ...],
    max_message_bytes: int,
    budget: SharedBudget,
    reading: Reading | None,
    /,
) -> Session: ...

class _Decoder(Protocol):
    def decode(self, message: bytes, /) -> Any: ...
    def read(self, message: bytes, /) -> Any: ...

def CompiledDecoder(  # noqa: N802
    record: type,
    names: tuple[str, ...],
    every: tuple[str, ...],
    head: tuple[type, str, tuple[str, ...], tuple[str, ...]] | None,
    /,
) -> _Decoder: ...
def CompiledColumns(  # noqa: N802
    load: type, endpoints: dict[str, Any], workers: Sequence[Any], now: float, rates: Rates, /
) -> LoadColumns: ...

class CompiledPace(PlainPace): ...
class CompiledNumbers(PlainNumbers): ...
class CompiledMarkTable(PlainMarkTable): ...

def expected(
    old: PlainMarkTable,
    young: PlainMarkTable,
    lengths: Sequence[int],
    keys: bytes,
    now: float,
    lifetimes: Lifetimes,
    /,
) -> dict[str, Expected]: ...
def drawn(places: Sequence[int], count: int, random: Callable[[], float], /) -> list[int]: ...
def lowest(
    ranks: Sequence[float] | Sequence[tuple[float, float]],
    count: int,
    random: Callable[[], float],
    /,
) -> list[int] | None: ...
def plain_chat(
    body: bytes, limited: bytes, /
) -> tuple[str | None, str | None, bytes, bytes] | None: ...
def turn_texts(
    body: bytes,
    spans: bytes,
    new: list[int],
    before: tuple[str, ...],
    behind: tuple[str, ...],
    /,
) -> list[str | None]: ...

class TurnTable:
    def __new__(cls, max_bytes: int, secret: bytes, /) -> Self: ...
    def find(
        self, body: bytes, spans: bytes, shapes: bytes, /
    ) -> tuple[list[Tokens | bytes], list[int]]: ...
    def keep(
        self, parts: list[Tokens | bytes], new: list[int], shapes: bytes, made: list[Tokens], /
    ) -> None: ...
