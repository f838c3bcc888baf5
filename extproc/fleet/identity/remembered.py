"""What outlives a restart of the router besides the workers' blocks: their engines and speeds.

It is restored once a worker's publisher has proven that it is the same engine; without that, all of
it is learned again.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from extproc.base.engine import ENGINES, FRONT_ENDS, Engine, PromptArguments
from extproc.fleet.identity.identifying import Identifying
from extproc.fleet.records.engine_identity import EngineAnswer, are_short
from extproc.fleet.records.worker import Worker
from extproc.routing.load.speed import SavedSpeed
from kvstate.undecodable import decode_saved


class _Remembered(NamedTuple):
    """What is known of one worker."""

    engine: Engine | None
    arguments: PromptArguments | None
    speed: SavedSpeed | None

    @property
    def is_sound(self) -> bool:
        """Whether a worker can have been like that."""
        engine, arguments = self.engine, self.arguments
        return (
            (engine is None or _is_sound(engine))
            and (arguments is None or are_short(arguments))
            and (self.speed is None or self.speed.is_sound)
        )


def _is_sound(engine: Engine) -> bool:
    is_known = engine.name in ENGINES and engine.front_end in FRONT_ENDS
    return is_known and min(engine.release) >= 0


# Workers that are encoded without a pause: under a millisecond.
AT_ONCE = 64

_decoder = msgspec.msgpack.Decoder(dict[str, _Remembered])


class RememberedWorkers:
    """Keeps what is known of the workers' engines and speeds.

    records: of the workers, by name. monotonic: the clock of the loads, in seconds.
    """

    section = "workers"
    version = 1

    def __init__(
        self,
        records: Mapping[str, Worker],
        identifying: Identifying,
        monotonic: Callable[[], float],
        at_once: int = AT_ONCE,
    ) -> None:
        self._at_once = at_once
        self._records = records
        self._identifying = identifying
        self._monotonic = monotonic
        self._restored: dict[str, _Remembered] = {}

    def saved(self) -> Iterator[bytes]:
        """Yields what is known now, some workers at a time, as bytes."""
        workers = list(self._records.values())
        for begin in range(0, len(workers), self._at_once):
            some = workers[begin : begin + self._at_once]
            yield msgspec.msgpack.encode({worker.name: self._remember(worker) for worker in some})

    def restore(self, contents: bytes) -> None:
        """Takes what was saved; it counts for each worker from `note_proven` on.

        Raises:
            ValueError: it is no such thing.
        """
        read = decode_saved(_decoder, contents)
        if not all(one.is_sound for one in read.values()):
            raise ValueError("no worker is like that")
        self._restored |= read

    def note_proven(self, worker: str) -> None:
        """Notes that a worker is the one of which something was saved.

        What it said since counts more.
        """
        record, known = self._records.get(worker), self._restored.pop(worker, None)
        if record is None or known is None:
            return
        if record.engine_answer.engine is None and known.engine is not None:
            record.identify(EngineAnswer(known.engine, "", known.arguments))
            self._identifying.expect(record)
        if record.upstream is not None and known.speed is not None:
            record.upstream.load.speed.restore(known.speed, self._monotonic())

    def _remember(self, worker: Worker) -> _Remembered:
        upstream = worker.upstream
        now = self._monotonic()
        speed = None if upstream is None else upstream.load.speed.saved(now)
        return _Remembered(worker.engine_answer.engine, worker.engine_answer.arguments, speed)
