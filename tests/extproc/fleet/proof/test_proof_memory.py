"""Proofs of tokens that outlive a restart: of the same worker with the same files only."""

import msgspec
import pytest

from extproc.base.engine import Engine, Release
from extproc.config.reader import parse
from extproc.fleet.proof.proof_memory import ProofMemory
from extproc.fleet.records.engine_identity import EngineAnswer
from extproc.fleet.workers import Workers
from extproc.proof.state import NOT_SEEN, Comparison, GoldenVerdict, Proof
from extproc.requests.dialect import Printed
from extproc.requests.prompt import CONVERSATION, PRINTED, TEXT, TOOLS
from kvstate.fleet import FollowedWorkers

NAME, OTHER = "127.0.0.1:8001", "127.0.0.1:8002"
PROVED = TEXT | CONVERSATION


class Fleet:
    """The workers of one process, and what it keeps of their proofs."""

    def __init__(self, digest: bytes = b"files") -> None:
        listed = f"[{{endpoint: '{NAME}'}}, {{endpoint: '{OTHER}'}}]"
        config = parse(f"models: [{{name: tiny}}]\nworkers: {listed}", "c")
        workers = Workers(config, FollowedWorkers(1, lambda: 0.0), lambda _: [])
        self.worker = workers.records[NAME]
        self.proof = self.worker.proof
        self.kept = ProofMemory(
            workers.records,
            workers.candidates.model_of,
            {"tiny": digest},
            lambda: 5.0,
            workers.engines.note_printed,
        )
        self.identifying = workers.engines.identifying
        self.identifying.watch(self.kept.note_engine)

    def know_engine(self) -> None:
        self.worker.identify(EngineAnswer(Engine("vllm", Release(0, 24)), ""))
        self.identifying.expect(self.worker)


@pytest.fixture
def pieces() -> list[bytes]:
    """What is saved of one worker that stored a conversation as it is tokenized here."""
    fleet = Fleet()
    fleet.proof.look_up(PROVED, 1.0, is_stored=True)
    return list(fleet.kept.saved())


def restored(pieces: list[bytes], digest: bytes = b"files", proven: str = NAME) -> Fleet:
    fleet = Fleet(digest)
    for piece in pieces:
        fleet.kept.restore(piece)
    assert not fleet.proof.proved
    fleet.kept.note_proven(proven)
    return fleet


def test_worker_that_is_the_same_has_proved_the_same_forms(pieces: list[bytes]) -> None:
    proof = restored(pieces).proof
    assert proof.proved == PROVED
    assert proof.state_of(TEXT).changed_at == 5.0
    assert proof.state_of(TOOLS).proof is Proof.UNPROVED


def printing(printed: Printed | None) -> list[bytes]:
    """What is saved of a worker that has shown how it prints the tools of responses."""
    fleet = Fleet()
    fleet.know_engine()
    if printed is not None:
        fleet.worker.printed = printed
    fleet.proof.look_up(PROVED | PRINTED, 1.0, is_stored=True)
    return list(fleet.kept.saved())


@pytest.mark.parametrize("printed", [None, Printed.OPENAI_2_0])
@pytest.mark.parametrize("is_early", [False, True])
def test_how_tools_are_printed_is_known_again(printed: Printed | None, *, is_early: bool) -> None:
    fleet = Fleet()
    for piece in printing(printed):
        fleet.kept.restore(piece)
    if is_early:
        fleet.know_engine()
    fleet.kept.note_proven(NAME)
    assert fleet.proof.proved == PROVED | (PRINTED if is_early else 0)
    fleet.know_engine()
    assert (fleet.proof.proved, fleet.worker.printed) == (PROVED | PRINTED, printed)


def test_restart_before_the_engine_is_known_forgets_how_tools_are_printed() -> None:
    fleet = restored(printing(Printed.OPENAI_2_0))
    fleet.proof.restart(6.0)
    fleet.know_engine()
    assert (fleet.proof.proved, fleet.worker.printed) == (0, None)


def test_proofs_that_were_saved_without_how_tools_are_printed_are_read() -> None:
    assert restored([msgspec.msgpack.encode({NAME: (b"files", PROVED)})]).proof.proved == PROVED


def test_later_findings_count_more(pieces: list[bytes]) -> None:
    fleet = restored(pieces)
    fleet.proof.compare(Comparison(1, {TEXT: GoldenVerdict(is_same=False)}), 6.0)
    assert fleet.proof.state_of(TEXT).proof is Proof.REFUTED
    fleet.proof.restart(7.0)
    assert not fleet.proof.proved


@pytest.mark.parametrize(("digest", "proven"), [(b"other", NAME), (b"files", OTHER), (b"", NAME)])
def test_other_files_and_other_workers_begin_unproved(
    pieces: list[bytes], digest: bytes, proven: str
) -> None:
    fleet = restored(pieces, digest, proven)
    assert (fleet.proof.proved, fleet.proof.state_of(TEXT).reason) == (0, NOT_SEEN)


@pytest.mark.parametrize(
    "contents", [b"\xc1", msgspec.msgpack.encode({NAME: (b"files", -1)}), b"\x80\x80"]
)
def test_damaged_sections_are_refused(contents: bytes) -> None:
    with pytest.raises(ValueError, match=r"not readable|proved this"):
        Fleet().kept.restore(contents)


def test_worker_of_an_unknown_model_is_not_saved() -> None:
    fleet = Fleet(b"")
    fleet.proof.look_up(PROVED, 1.0, is_stored=True)
    assert list(fleet.kept.saved()) == [msgspec.msgpack.encode({})]
