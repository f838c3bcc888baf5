"""What outlives a restart of the router of the proofs of its tokens.

A proof is about an engine's process and about the files here. So it is restored once the worker's
publisher has proven that it is the same process, and only for a model whose files, and the release
that reads them, are the same (`extproc.tokenizing.file_digest`). What releases read differently,
how tools are printed among it, counts once the worker's engine is known as well: when that becomes
known, what was proved of it before is forgotten.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from extproc.fleet.records.worker import Worker
from extproc.requests.dialect import Printed
from extproc.requests.prompt import BY_RELEASE, DAYS, FORM_NAMES
from kvstate.undecodable import decode_saved

# Workers that are encoded without a pause: well under a millisecond.
AT_ONCE = 256

_ALL_FORMS = sum(FORM_NAMES)


class _SavedProof(NamedTuple):
    """The forms of request whose tokens a worker has proved, and the digest of their model.

    printed: how it prints the tools of responses, None if as is likeliest.
    """

    digest: bytes
    forms: int
    printed: Printed | None = None


_decoder = msgspec.msgpack.Decoder(dict[str, _SavedProof])


class ProofMemory:
    """Keeps what workers have proved of the router's tokens.

    records: of the workers, by name. model_of: returns the model that a worker serves, None while
    it is unknown. digests: of the models' files, by model. monotonic: seconds. speak: takes how a
    worker prints the tools of responses.
    """

    section = "proofs"
    version = 1

    def __init__(
        self,
        records: Mapping[str, Worker],
        model_of: Callable[[Worker], str | None],
        digests: Mapping[str, bytes],
        monotonic: Callable[[], float],
        speak: Callable[[Worker, Printed], None],
    ) -> None:
        self._speak = speak
        self._records = records
        self._model_of = model_of
        self._digests = digests
        self._monotonic = monotonic
        self._restored: dict[str, _SavedProof] = {}
        self._proven: dict[str, _SavedProof] = {}  # whose engine is not known yet

    def saved(self) -> Iterator[bytes]:
        """Yields what is proved now, some workers at a time, as bytes."""
        workers = list(self._records.values())
        for begin in range(0, len(workers), AT_ONCE):
            some = {
                worker.name: _SavedProof(digest, worker.proof.proved, worker.printed)
                for worker in workers[begin : begin + AT_ONCE]
                if worker.proof.proved and (digest := self._digest_of(worker))
            }
            yield msgspec.msgpack.encode(some)

    def restore(self, contents: bytes) -> None:
        """Takes what was saved; it counts for each worker from `note_proven` on.

        Raises:
            ValueError: it is no such thing.
        """
        read = decode_saved(_decoder, contents)
        if not all(0 <= one.forms <= _ALL_FORMS for one in read.values()):
            raise ValueError("no worker can have proved this")
        self._restored |= read

    def note_proven(self, worker: str) -> None:
        """Notes that a worker is the one of which something was saved."""
        record, known = self._records.get(worker), self._restored.pop(worker, None)
        if record is None or known is None or known.digest != self._digest_of(record):
            return
        record.proof.restore(known.forms & ~BY_RELEASE, self._monotonic())
        self._proven[worker] = known
        self.note_engine(worker)

    def note_engine(self, worker: str) -> None:
        """Notes that a worker's engine may have become known."""
        record = self._records.get(worker)
        if record is None or record.engine is None or worker not in self._proven:
            return
        known = self._proven.pop(worker)
        plain = known.forms & ~BY_RELEASE & ~DAYS
        if not (plain and record.proof.is_proved(plain)):
            return  # it has been restarted since
        if known.printed is not None and known.printed is not record.printed:
            self._speak(record, known.printed)
        record.proof.restore(known.forms & BY_RELEASE, self._monotonic())

    def _digest_of(self, worker: Worker) -> bytes | None:
        return self._digests.get(self._model_of(worker) or "")
