"""What outlives a restart besides blocks: for a worker that is the same, and only for that."""

import msgspec
import pytest

from extproc.base.engine import Engine, PromptArguments, Release
from extproc.config.reader import parse
from extproc.fleet.identity.remembered import RememberedWorkers
from extproc.fleet.records.engine_identity import MAX_ARGUMENT, EngineAnswer
from extproc.fleet.records.worker import Worker
from extproc.fleet.workers import Workers
from extproc.routing.load.speed import Common, Speed
from kvstate.fleet import FollowedWorkers

NAMES = [f"127.0.0.1:{port}" for port in range(8001, 8004)]
SGLANG = Engine("sglang", Release(0, 5, 9))
ARGUMENTS = PromptArguments(chat_template="chatml")


class Fleet:
    """The workers of one process, and what is remembered of them."""

    def __init__(self, names: list[str] = NAMES) -> None:
        listed = ", ".join(f"{{endpoint: '{name}'}}" for name in names)
        config = parse(f"models: [{{name: tiny}}]\nworkers: [{listed}]", "c")
        workers = Workers(config, FollowedWorkers(1, lambda: 0.0), lambda _: [])
        self.records = workers.records
        self.kept = RememberedWorkers(
            self.records, workers.engines.identifying, lambda: 1000.0, at_once=2
        )

    def speed(self, name: str) -> Speed[object]:
        upstream = self.records[name].upstream
        assert upstream is not None
        return upstream.load.speed  # type: ignore[return-value]


def learn(fleet: Fleet, worker: Worker) -> None:
    """A worker said what it runs, and was found to be slow."""
    worker.identify(EngineAnswer(SGLANG, "", ARGUMENTS))
    speed = fleet.speed(worker.name)
    speed.begin("prompt", 1.0, 990.0, is_sure=True)
    speed.note_computed("prompt", 993.0, Common())


@pytest.fixture
def pieces() -> list[bytes]:
    """What a fleet saved, of two workers and then one."""
    fleet = Fleet()
    learn(fleet, fleet.records[NAMES[0]])
    return list(fleet.kept.saved())


def test_proven_worker_has_its_engine_and_speed_again(pieces: list[bytes]) -> None:
    fleet = Fleet()
    for piece in pieces:
        fleet.kept.restore(piece)
    record = fleet.records[NAMES[0]]
    before = record.engine
    fleet.kept.note_proven(NAMES[0])
    assert (before, record.engine, record.identity.arguments) == (None, SGLANG, ARGUMENTS)
    assert fleet.speed(NAMES[0]).slowness_alone > 2.0
    assert list(fleet.kept.saved()) == pieces


def test_newer_answer_of_a_worker_counts_more(pieces: list[bytes]) -> None:
    fleet = Fleet()
    fleet.kept.restore(pieces[0])
    record = fleet.records[NAMES[0]]
    vllm = Engine("vllm", Release(0, 32))
    record.identify(EngineAnswer(vllm, ""))
    fleet.kept.note_proven(NAMES[0])
    assert record.engine == vllm


def test_workers_of_which_nothing_was_saved_begin_anew(pieces: list[bytes]) -> None:
    fleet = Fleet(NAMES[1:])
    fleet.kept.restore(pieces[0])
    for name in (NAMES[0], NAMES[1], NAMES[2], "no worker"):
        fleet.kept.note_proven(name)
    assert all(record.engine is None for record in fleet.records.values())
    assert fleet.speed(NAMES[1]).saved(0.0) is None


def test_worker_without_an_address_is_saved_without_a_speed() -> None:
    fleet = Fleet(["worker.example:8000"])
    (piece,) = fleet.kept.saved()
    fleet.kept.restore(piece)
    fleet.kept.note_proven("worker.example:8000")
    assert msgspec.msgpack.decode(piece) == {"worker.example:8000": [None, None, None]}


ENGINE = ["vllm", [0, 32, 0]]


@pytest.mark.parametrize(
    "known",
    [
        [["other", [1, 0, 0]], None, None],
        [["vllm", [-1, 0, 0]], None, None],
        [ENGINE, ["x" * (MAX_ARGUMENT + 1), None, None, None, None], None],
        [ENGINE, None, [0.0, -1.0, 0.0, 0.0, [0.0] * 5]],
    ],
)
def test_impossible_workers_are_refused(known: object) -> None:
    with pytest.raises(ValueError, match="no worker is like that"):
        Fleet().kept.restore(msgspec.msgpack.encode({NAMES[0]: known}))


@pytest.mark.parametrize("contents", [b"", b"\xc1", b"\x81\xa1\xff\x93\xc0\xc0\xc0", b"\x90"])
def test_unreadable_contents_are_refused(contents: bytes) -> None:
    with pytest.raises(ValueError, match="not readable"):
        Fleet().kept.restore(contents)
