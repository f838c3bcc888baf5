"""How requests name a data-parallel rank to an engine, and whether a worker obeys.

An engine reads the rank from a header or from a field of the body, depending on its release and on
the API. What it does not read it ignores with status 200, and computes the prompt on any rank; so a
rank is named only where it is read, and only there are the blocks of one rank certain.

The table is checked by events: the rank that stores a request's new blocks is known from its feed.
A worker that ignores several of the last pins of an API is not given any more there.
"""

from collections import deque
from typing import NamedTuple

from extproc.base.engine import SGLANG, VLLM, Engine, Release
from extproc.base.headers import RANK

# Of the last findings of an API on a worker, so many ignored pins refute it. An engine that ignores
# pins still computes some requests on the rank that they name, by chance.
LAST_FINDINGS = 8
IGNORED_PINS = 3


class Pin(NamedTuple):
    """How a request names a rank: in a header, in lower case, or in a field of its body."""

    name: str
    in_body: bool = False


class PinnedRank(NamedTuple):
    """A rank that a request on a path names."""

    rank: int
    pin: Pin
    path: str


class _Row(NamedTuple):
    """The releases of an engine, from the first one, that read a pin on some paths."""

    engine: str
    since: Release
    paths: tuple[str, ...]
    pin: Pin


_HEADER = Pin(RANK)
_OLDER_FIELD, _FIELD = Pin("data_parallel_rank", True), Pin("routed_dp_rank", True)
_COMPLETIONS = ("/v1/completions", "/v1/chat/completions")

# The last row that fits counts. Sources: the callers of `_get_data_parallel_rank` in the servers of
# vLLM 0.10.2, 0.11.0, 0.11.2, 0.13, 0.16, 0.24 and 0.32, of which /v1/responses is none; the
# request models and callers of `extract_routed_dp_rank_from_header` in SGLang 0.5.2, 0.5.9, 0.5.10,
# 0.5.19, 0.5.20 and 0.5.23.
_ROWS = (
    _Row(VLLM, Release(0, 11, 2), (*_COMPLETIONS, "/v1/messages"), _HEADER),
    _Row(SGLANG, Release(0, 5, 2), ("/generate",), _OLDER_FIELD),
    _Row(SGLANG, Release(0, 5, 9), _COMPLETIONS, _OLDER_FIELD),
    _Row(SGLANG, Release(0, 5, 10), ("/generate",), _FIELD),
    _Row(SGLANG, Release(0, 5, 10), (*_COMPLETIONS, "/v1/messages"), _HEADER),
    _Row(SGLANG, Release(0, 5, 20), ("/v1/responses",), _HEADER),
)


def pin_of(engine: Engine, path: str) -> Pin | None:
    """Returns how requests on a path name a rank to an engine; None if it reads none there."""
    found = None
    for row in _ROWS:
        if row.engine == engine.name and row.since <= engine.release and path in row.paths:
            found = row.pin
    return found


class PinFindings:
    """What a worker did with the ranks that requests named, by path."""

    __slots__ = ("_last", "ignored", "obeyed")

    def __init__(self) -> None:
        self.obeyed: dict[str, int] = {}
        self.ignored: dict[str, int] = {}
        self._last: dict[str, deque[bool]] = {}

    def note(self, path: str, *, is_obeyed: bool) -> None:
        """Notes whether the named rank computed a request."""
        count = self.obeyed if is_obeyed else self.ignored
        count[path] = count.get(path, 0) + 1
        self._last.setdefault(path, deque(maxlen=LAST_FINDINGS)).append(is_obeyed)

    def is_proved(self, path: str) -> bool:
        """Returns whether all of the last pins of a path, as many as refute it, were obeyed."""
        last = self._last.get(path, ())
        return len(last) >= IGNORED_PINS and all(last)

    def is_refuted(self, path: str) -> bool:
        """Returns whether the worker ignores the pins of a path."""
        return sum(not is_obeyed for is_obeyed in self._last.get(path, ())) >= IGNORED_PINS

    @property
    def paths(self) -> list[str]:
        """The paths with findings, in order."""
        return sorted(self._last)


class RankChoice(NamedTuple):
    """How a worker's rank may be named by a request. pin: None if it cannot be.

    is_certain: whether the named rank will compute the request, so that its blocks are certain.
    """

    pin: Pin | None
    is_certain: bool


NO_CHOICE = RankChoice(None, False)


def choice_of(
    configured: str | None, engine: Engine | None, findings: PinFindings, path: str
) -> RankChoice:
    """Returns how requests on a path may name a worker's rank.

    configured: the header that names ranks; None to go by the engine and its release. A header that
    is configured is certain where the table says so too, or once it is proved.
    """
    if findings.is_refuted(path):
        return NO_CHOICE
    known = None if engine is None else pin_of(engine, path)
    if configured is None:
        return RankChoice(known, known is not None)
    pin = Pin(configured)
    return RankChoice(pin, pin == known or findings.is_proved(path))
