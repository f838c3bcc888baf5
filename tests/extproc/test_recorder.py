import json
import resource
import stat
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from extproc.config.sections import Recorder as Settings
from extproc.observing.outcomes import Outcome, Usage
from extproc.picking.decision import Decision, Verdict
from extproc.recorder import (
    MAX_QUEUED_TOKENS,
    Recorder,
    RecorderCollector,
    drawn_secret,
    hash_ids,
    share_secret,
)
from kvstate.overlap import Prompt
from tests.extproc.admin.decisions import decided

SECRET = bytes(range(32))


def prompt(*tokens: int, model: str = "tiny", salt: str | None = None) -> Prompt:
    return Prompt(model, array("I", tokens), None, salt)


def decision(tokens: int, verdict: Verdict = Verdict.STEER) -> Decision:
    return replace(decided(tokens=tokens), prompt_tokens=tokens, verdict=verdict)


def outcome(status: int = 200, **reported: Any) -> Outcome:
    usage = Usage(**reported)
    return Outcome("tiny", "w", *(False, status, 0.25, 4, 0, usage, True))


@pytest.fixture
def started() -> Iterator[Callable[..., Recorder]]:
    made: list[Recorder] = []

    def start(path: Path, **settings: Any) -> Recorder:
        values = {"file": str(path), "block_size": 4, **settings}
        one = Recorder(Settings(**values), str(path), SECRET)
        one.start()
        made.append(one)
        return one

    yield start
    for one in made:
        one.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_recorded(recorder: Recorder, count: int) -> bool:
    return recorder.recorded == count


def has_lost(recorder: Recorder, count: int) -> bool:
    return recorder.not_recorded_by_reason()["disk"] == count


def record(recorder: Recorder, *tokens: int, told: Outcome | None = None) -> None:
    one = decision(len(tokens))
    recorder.decided(one, [prompt(*tokens)])
    recorder.end(one, told)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_equal_prefixes_have_equal_numbers_and_nothing_else_has() -> None:
    one = hash_ids(SECRET, prompt(*range(10)), 4)
    assert len(one) == 3
    assert hash_ids(SECRET, prompt(*range(9), 77), 4)[:2] == one[:2]
    # the same block after a different one has a different number
    assert not set(hash_ids(SECRET, prompt(9, *range(1, 10)), 4)) & set(one)
    for other in (
        hash_ids(bytes(32), prompt(*range(10)), 4),
        hash_ids(SECRET, prompt(*range(10), model="other"), 4),
        hash_ids(SECRET, prompt(*range(10), salt="tenant"), 4),
    ):
        assert not set(other) & set(one)


def test_a_request_is_a_line_in_mooncakes_format(
    tmp_path: Path, started: Callable[..., Recorder]
) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = started(path)
    record(recorder, *range(10), told=outcome(cached_tokens=4, output_tokens=7))
    record(recorder, *range(10))
    recorder.close()
    first, second = lines(path)
    assert first["hash_ids"] == hash_ids(SECRET, prompt(*range(10)), 4) == second["hash_ids"]
    assert (first["input_length"], first["output_length"], first["block_size"]) == (10, 7, 4)
    assert (first["cached_length"], first["ttft_ms"]) == (4, 250)
    assert (second["output_length"], "cached_length" in second) == (0, False)
    assert 0 <= first["timestamp"] < 60_000
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert recorder.recorded == 2


def test_what_cannot_be_recorded_is_counted_by_its_reason(
    tmp_path: Path, started: Callable[..., Recorder]
) -> None:
    recorder = started(tmp_path / "trace.jsonl")
    recorder.decided(decision(0), [])
    recorder.decided(decision(2), [prompt(1), prompt(2)])
    recorder.decided(decision(2, Verdict.SHED), [prompt(1, 2)])
    record(recorder, 1, 2, told=outcome(status=500))
    recorder.end(decision(1), None)  # the recorder never received this decision
    recorder.close()
    assert lines(tmp_path / "trace.jsonl") == []
    (recorded, missed) = RecorderCollector(recorder).collect()
    assert recorded.samples[0].value == 0
    counts = {one.labels["reason"]: one.value for one in missed.samples}
    assert counts == {
        "queue_full": 0, "disk": 0, "no_tokens": 1, "several_prompts": 1, "failed": 2,
    }  # fmt: skip


def test_a_thread_that_cannot_keep_up_costs_lines_and_no_memory(tmp_path: Path) -> None:
    path = str(tmp_path / "trace.jsonl")
    recorder = Recorder(Settings(file=path), path, SECRET)  # its thread is not started
    long = Prompt("tiny", array("I", bytes(4 * (MAX_QUEUED_TOKENS // 4))))
    for _ in range(6):
        recorder.decided(decision(1), [long])
    assert recorder.not_recorded_by_reason()["queue_full"] == 2


def test_files_are_replaced_and_take_no_more_than_they_may(
    tmp_path: Path, started: Callable[..., Recorder]
) -> None:
    path, older = tmp_path / "trace.jsonl", tmp_path / "trace.jsonl.old"
    path.write_text("of a run before")
    recorder = started(path, bytes=1024 * 1024)
    until(older.exists)
    assert older.read_text() == "of a run before"
    for number in range(12):
        written = recorder.recorded
        record(recorder, *range(number, number + 50_000))
        until(partial(has_recorded, recorder, written + 1))
    recorder.close()
    sizes = [one.stat().st_size for one in (path, older)]
    assert sum(sizes) <= 1024 * 1024
    assert min(sizes) > 0
    assert len(list(tmp_path.iterdir())) == 2
    assert stat.S_IMODE(older.stat().st_mode) == 0o600


def test_a_start_without_a_request_keeps_what_was_recorded_before(
    tmp_path: Path, started: Callable[..., Recorder]
) -> None:
    path, older = tmp_path / "trace.jsonl", tmp_path / "trace.jsonl.old"
    path.write_text("of a run before")
    for _ in range(3):
        started(path).close()
    assert older.read_text() == "of a run before"
    assert not path.stat().st_size


def test_a_file_that_is_old_is_replaced_without_any_request(tmp_path: Path) -> None:
    path, now = tmp_path / "trace.jsonl", [1_000.0]
    recorder = Recorder(Settings(hours=2), str(path), SECRET, clock=lambda: now[0])
    recorder.start()
    record(recorder, 1, 2, 3)
    until(lambda: recorder.recorded)
    now[0] += 3600
    until(path.with_name("trace.jsonl.old").exists)
    now[0] += 3600
    until(lambda: not path.with_name("trace.jsonl.old").stat().st_size)
    recorder.close()


def test_a_disk_that_is_full_is_told_once_and_recovers(
    tmp_path: Path, started: Callable[..., Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvsteer.recorder")
    recorder = started(path := tmp_path / "trace.jsonl")
    record(recorder, 1, 2, 3)
    until(lambda: recorder.recorded)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (before + 20, limits[1]))
    try:
        for lost in (1, 2):
            record(recorder, 4, 5, 6)
            until(partial(has_lost, recorder, lost))
        assert path.stat().st_size == before  # no partial line
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    record(recorder, 7, 8, 9)
    until(lambda: recorder.recorded == 2)
    assert len(lines(path)) == 2
    told = [one.levelname for one in caplog.records]
    assert told == ["ERROR", "INFO"]


@pytest.mark.parametrize("kind", ["folder", "nowhere"])
def test_a_file_that_cannot_be_made_is_counted_and_nothing_is_moved(
    tmp_path: Path, started: Callable[..., Recorder], kind: str
) -> None:
    path = tmp_path / ("folder" if kind == "folder" else "none/trace.jsonl")
    (tmp_path / "folder").mkdir()
    recorder = started(path)
    record(recorder, 1, 2, 3)
    until(lambda: recorder.not_recorded_by_reason()["disk"] == 1)
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]


def test_processes_of_one_parent_have_one_secret_and_others_none_of_it() -> None:
    environment: dict[str, str] = {}
    share_secret(environment)
    assert drawn_secret(environment) == drawn_secret(environment)
    assert drawn_secret({}) != drawn_secret({})
    assert len(drawn_secret({"KVSTEER_RECORDER_SECRET": "no number"})) == 32
    assert len(drawn_secret({"KVSTEER_RECORDER_SECRET": "00"})) == 32
