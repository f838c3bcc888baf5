import json
import os
import resource
import stat
import time
from array import array
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from extproc.config.sections import RecorderSettings as Settings
from extproc.features.recording.recorder import (
    MAX_OLDER,
    MAX_OPEN,
    MAX_QUEUED_TOKENS,
    OLDER,
    Recorder,
    RecorderCollector,
    drawn_secret,
    hash_ids,
    share_secret,
)
from extproc.observing.outcomes import Outcome
from extproc.observing.usage import Usage
from extproc.requests.tenant_salt import Tenant
from extproc.routing.claims.homes import Turn
from extproc.routing.decision import Decision, Verdict
from extproc.routing.savings.belonging import Belonging
from kvstate.overlap import Prompt
from kvtools.whatif.traces import Trace
from tests.extproc.admin.decisions import decided
from tests.waiting import blocked_until

SECRET = bytes(range(32))


def prompt(*tokens: int, model: str = "tiny", salt: str | None = None) -> Prompt:
    return Prompt(model, array("I", tokens), None, salt)


def decision(tokens: int, verdict: Verdict = Verdict.STEER) -> Decision:
    made = decided(tokens=tokens)
    return replace(made, basis=replace(made.basis, prompt_tokens=tokens), verdict=verdict)


def outcome(status: int = 200, **reported: Any) -> Outcome:
    usage = Usage(**reported)
    return Outcome(
        "tiny",
        "w",
        is_moved=False,
        status=status,
        ttft_seconds=0.25,
        prompt_tokens=4,
        predicted_tokens=0,
        reported=usage,
        is_comparable=True,
    )


@pytest.fixture
def started() -> Iterator[Callable[..., Recorder]]:
    made: list[Recorder] = []

    def start(path: Path, max_open: int = MAX_OPEN, **settings: Any) -> Recorder:
        values = {"file": str(path), "block_size": 4, **settings}
        one = Recorder(Settings(**values), str(path), SECRET, max_open=max_open)
        one.start()
        made.append(one)
        return one

    yield start
    for one in made:
        one.close()


def has_recorded(recorder: Recorder, count: int) -> bool:
    return recorder.recorded == count


def has_lost(recorder: Recorder, count: int) -> bool:
    return recorder.not_recorded_by_reason()["disk"] == count


def record(recorder: Recorder, *tokens: int, told: Outcome | None = None) -> None:
    one = decision(len(tokens))
    recorder.note_decision(one, [prompt(*tokens)])
    recorder.end(one, told)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_hash_ids_are_equal_exactly_for_equal_prefixes() -> None:
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


def test_numbers_leave_out_the_salt_of_a_tenant_and_no_other() -> None:
    plain = hash_ids(SECRET, prompt(*range(10)), 4)
    salted, owned = prompt(*range(10), salt="theirs"), prompt(*range(10), salt="own")
    tenant = Tenant(b"a", "theirs")
    assert hash_ids(SECRET, salted, 4, tenant) == plain
    assert not {*hash_ids(SECRET, owned, 4, tenant)} & {*plain}


@pytest.mark.parametrize("salt", ["", "theirs"])
def test_line_names_its_tenant_by_a_keyed_number(
    tmp_path: Path, started: Callable[..., Recorder], salt: str
) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = started(path)
    for tenant in (Tenant(b"acme", salt), Tenant(b"acme"), Tenant(b"other"), Tenant(b""), None):
        one = replace(decision(4), tenant=tenant)
        recorder.note_decision(one, [prompt(1, 2, 3, 4)])
        recorder.end(one, None)
    recorder.close()
    first, again, other, *unnamed = [line.get("tenant", "") for line in lines(path)]
    assert first == again != other
    assert unnamed == ["", ""]
    assert len(other) == 12
    assert "acme" not in path.read_text()


def test_line_has_a_keyed_number_of_the_session_that_a_header_names(
    tmp_path: Path, started: Callable[..., Recorder]
) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = started(path)
    for session in ("mine", "mine", "yours", "\udc80", ""):
        one = decision(4)
        recorder.note_decision(one, [prompt(1, 2, 3, 4)], session)
        recorder.end(one, None)
    recorder.close()
    first, again, other, odd, unnamed = [line.get("session_header", "") for line in lines(path)]
    assert first == again
    assert len({first, other, odd, unnamed}) == 4
    assert (len(other), unnamed) == (12, "")
    assert "mine" not in path.read_text()


def test_recorder_writes_a_line_in_mooncake_format(
    tmp_path: Path, started: Callable[..., Recorder]
) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = started(path)
    streamed = outcome(cached_tokens=4, output_tokens=7)._replace(is_streamed=True)
    record(recorder, *range(10), told=streamed)
    record(recorder, *range(10))
    recorder.close()
    first, second = lines(path)
    assert first["placed_by"] == second["placed_by"] == "cost"
    assert first["hash_ids"] == hash_ids(SECRET, prompt(*range(10)), 4) == second["hash_ids"]
    assert (first["input_length"], first["output_length"], first["block_size"]) == (10, 7, 4)
    assert (first["cached_length"], first["ttft_ms"]) == (4, 250)
    assert (second["output_length"], "cached_length" in second) == (0, False)
    assert "ttft_ms" not in second  # its first byte came with its last token
    assert 0 <= first["timestamp"] < 60_000
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert recorder.recorded == 2


def unkeyed(*keys: int, follows: int = 0) -> Decision:
    """A decision on a request without known tokens, with the keys of its conversation."""
    made = decision(0)
    return replace(made, basis=replace(made.basis, belonging=Belonging(turn=Turn(keys, follows))))


def test_recorder_writes_reported_lengths_and_sessions_where_tokens_are_not_known(
    tmp_path: Path, started: Callable[..., Recorder]
) -> None:
    path = tmp_path / "trace.jsonl"
    recorder = started(path)
    usage = outcome(prompt_tokens=900, cached_tokens=512, output_tokens=7)
    for one in (unkeyed(1), unkeyed(2, follows=1), unkeyed(3, 7), unkeyed(4, 7), unkeyed()):
        recorder.note_decision(one, [])
        recorder.end(one, usage)
    silent = unkeyed(1)
    recorder.note_decision(silent, [])
    recorder.end(silent, outcome())
    recorder.close()
    found = lines(path)
    assert {(one["input_length"], one["cached_length"]) for one in found} == {(900, 512)}
    assert not any("hash_ids" in one for one in found)
    first, second, third, fourth, last = (one.get("session") for one in found)
    assert first == second != third == fourth
    assert last is None
    assert recorder.not_recorded_by_reason()["no_tokens"] == 1
    trace = Trace()
    trace.read("trace", path.read_bytes().splitlines())
    assert len(trace.requests) == 5


def test_recorder_forgets_the_oldest_sessions(
    tmp_path: Path, started: Callable[..., Recorder]
) -> None:
    recorder = started(tmp_path / "trace.jsonl", max_open=2)
    for one in (unkeyed(1), unkeyed(2), unkeyed(3), unkeyed(4, follows=1)):
        recorder.note_decision(one, [])
        recorder.end(one, outcome(prompt_tokens=9))
    recorder.close()
    sessions = [one["session"] for one in lines(tmp_path / "trace.jsonl")]
    assert len(set(sessions)) == 4


def test_recorder_counts_unrecorded_requests_by_reason(
    tmp_path: Path, started: Callable[..., Recorder]
) -> None:
    recorder = started(tmp_path / "trace.jsonl")
    unknown = decision(0)
    recorder.note_decision(unknown, [])
    recorder.end(unknown, outcome())
    recorder.note_decision(decision(2), [prompt(1), prompt(2)])
    recorder.note_decision(decision(2, Verdict.SHED), [prompt(1, 2)])
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


def test_recorder_with_a_slow_thread_drops_lines_and_bounds_memory(tmp_path: Path) -> None:
    path = str(tmp_path / "trace.jsonl")
    recorder = Recorder(Settings(file=path), path, SECRET)  # its thread is not started
    long = Prompt("tiny", array("I", bytes(4 * (MAX_QUEUED_TOKENS // 4))))
    for _ in range(6):
        recorder.note_decision(decision(1), [long])
    assert recorder.not_recorded_by_reason()["queue_full"] == 2


def test_recorder_replaces_files_within_its_bytes(
    tmp_path: Path, started: Callable[..., Recorder]
) -> None:
    path, older = tmp_path / "trace.jsonl", tmp_path / "trace.jsonl.old"
    path.write_text("of a run before")
    recorder = started(path, bytes=1024 * 1024)
    blocked_until(older.exists)
    assert older.read_text() == "of a run before"
    for number in range(12):
        written = recorder.recorded
        record(recorder, *range(number, number + 50_000))
        blocked_until(partial(has_recorded, recorder, written + 1))
    recorder.close()
    sizes = [one.stat().st_size for one in (path, older)]
    assert sum(sizes) <= 1024 * 1024
    assert min(sizes) > 0
    assert len(list(tmp_path.iterdir())) == 2
    assert stat.S_IMODE(older.stat().st_mode) == 0o600


def test_recorder_keeps_an_earlier_recording_until_a_request_comes(
    tmp_path: Path, started: Callable[..., Recorder]
) -> None:
    path, older = tmp_path / "trace.jsonl", tmp_path / "trace.jsonl.old"
    path.write_text("of a run before")
    for _ in range(3):
        started(path).close()
    assert older.read_text() == "of a run before"
    assert not path.stat().st_size


def test_recorder_replaces_an_old_file_without_a_request(tmp_path: Path) -> None:
    path, now = tmp_path / "trace.jsonl", [1_000.0]
    recorder = Recorder(Settings(hours=2), str(path), SECRET, monotonic=lambda: now[0])
    recorder.start()
    record(recorder, 1, 2, 3)
    blocked_until(lambda: recorder.recorded)
    now[0] += 3600
    blocked_until(path.with_name("trace.jsonl.old").exists)
    now[0] += 3600
    blocked_until(lambda: not path.with_name("trace.jsonl.old").stat().st_size)
    recorder.close()


def test_recorder_logs_a_full_disk_once_and_recovers(
    tmp_path: Path, started: Callable[..., Recorder], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvsteer.recorder")
    recorder = started(path := tmp_path / "trace.jsonl")
    record(recorder, 1, 2, 3)
    blocked_until(lambda: recorder.recorded)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (before + 20, limits[1]))
    try:
        for lost in (1, 2):
            record(recorder, 4, 5, 6)
            blocked_until(partial(has_lost, recorder, lost))
        assert path.stat().st_size == before  # no partial line
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    record(recorder, 7, 8, 9)
    blocked_until(lambda: recorder.recorded == 2)
    assert len(lines(path)) == 2
    told = [one.levelname for one in caplog.records]
    assert told == ["ERROR", "INFO"]


@pytest.mark.parametrize("kind", ["folder", "nowhere"])
def test_recorder_counts_an_uncreatable_file_and_moves_nothing(
    tmp_path: Path, started: Callable[..., Recorder], kind: str
) -> None:
    path = tmp_path / ("folder" if kind == "folder" else "none/trace.jsonl")
    (tmp_path / "folder").mkdir()
    recorder = started(path)
    record(recorder, 1, 2, 3)
    blocked_until(lambda: recorder.not_recorded_by_reason()["disk"] == 1)
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]


def test_drawn_secret_is_shared_by_processes_of_one_parent_only() -> None:
    environment: dict[str, str] = {}
    share_secret(environment)
    assert drawn_secret(environment) == drawn_secret(environment)
    assert drawn_secret({}) != drawn_secret({})
    assert len(drawn_secret({"KVSTEER_RECORDER_SECRET": "no number"})) == 32
    assert len(drawn_secret({"KVSTEER_RECORDER_SECRET": "00"})) == 32


@given(st.lists(st.integers(1, 400_000), max_size=12))
def test_recordings_survive_restarts_within_their_bytes(sizes: list[int]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        for number, size in enumerate(sizes):
            recorder = Recorder(Settings(bytes=1024 * 1024), str(path), SECRET)
            recorder.start()
            recorder.close()
            path.write_bytes(bytes([number]) * size)
            path.chmod(0o666)
        recorder = Recorder(Settings(bytes=1024 * 1024), str(path), SECRET)
        recorder.start()
        recorder.close()
        names = [f"trace.jsonl{OLDER}"]
        names += [f"trace.jsonl{OLDER}.{number}" for number in range(2, MAX_OLDER + 1)]
        wanted, total = [], 0
        for number, size in list(enumerate(sizes))[::-1][:MAX_OLDER]:
            total += size
            if total > 512 * 1024:
                break
            wanted.append(bytes([number]) * size)
        kept = [path.with_name(name) for name in names]
        assert [one.read_bytes() for one in kept if one.exists()] == wanted
        assert {stat.S_IMODE(one.stat().st_mode) for one in Path(folder).iterdir()} == {0o600}
        assert len(list(Path(folder).iterdir())) == len(wanted) + 1


def test_clock_change_starts_no_new_file(tmp_path: Path) -> None:
    path, now = tmp_path / "trace.jsonl", [1e9]
    recorder = Recorder(Settings(hours=2), str(path), SECRET, clock=lambda: now[0])
    recorder.start()
    for leap in (1e8, -2e8, 1e9):
        written = recorder.recorded
        now[0] += leap
        record(recorder, 1, 2, 3)
        blocked_until(partial(has_recorded, recorder, written + 1))
    recorder.close()
    assert [one.name for one in tmp_path.iterdir()] == ["trace.jsonl"]
    assert len(lines(path)) == 3


def test_recording_of_an_earlier_run_ends_with_its_hours(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    for age in (2, 0):  # hours
        path.write_text(str(age))
        os.utime(path, (time.time() - age * 3600, time.time() - age * 3600))
        recorder = Recorder(Settings(hours=1), str(path), SECRET)
        recorder.start()
        recorder.close()
    assert path.with_name("trace.jsonl.old").read_text() == "0"
    assert not path.with_name("trace.jsonl.old.2").exists()


def test_tokens_of_one_tenant_leave_room_for_those_of_others(tmp_path: Path) -> None:
    path = str(tmp_path / "trace.jsonl")
    recorder = Recorder(Settings(file=path), path, SECRET)  # its thread is not started
    long = Prompt("tiny", array("I", bytes(4 * (MAX_QUEUED_TOKENS // 8))))
    greedy, other = (
        [replace(decision(1), tenant=Tenant(name)) for _ in range(8)]
        for name in (b"greedy", b"other")
    )
    for one in greedy:
        recorder.note_decision(one, [long])
    assert recorder.not_recorded_by_reason()["queue_full"] == 2
    recorder.note_decision(other[0], [long])
    assert recorder.not_recorded_by_reason()["queue_full"] == 2
    for one in (*greedy, other[0]):
        recorder.end(one, outcome())
    recorder.start()
    recorder.close()
    recorder.note_decision(greedy[0], [long])
    assert recorder.not_recorded_by_reason()["queue_full"] == 2


def test_requests_in_flight_of_one_tenant_leave_room_for_those_of_others(tmp_path: Path) -> None:
    path = str(tmp_path / "trace.jsonl")
    recorder = Recorder(Settings(file=path), path, SECRET, max_open=8)  # its thread is not started
    greedy = [replace(decision(1), tenant=Tenant(b"greedy")) for _ in range(8)]
    for one in greedy:
        recorder.note_decision(one, [prompt(1)])
    assert recorder.not_recorded_by_reason()["queue_full"] == 2
    other = replace(decision(1), tenant=Tenant(b"other"))
    recorder.note_decision(other, [prompt(1)])
    assert recorder.not_recorded_by_reason()["queue_full"] == 2
    recorder.end(other, outcome())
    recorder.note_drop(greedy[0])
    recorder.note_decision(greedy[7], [prompt(1)])
    assert recorder.not_recorded_by_reason()["queue_full"] == 2


ENDS = st.sampled_from(("served", "unknown", "error", "dropped"))


@given(st.lists(ENDS, max_size=40))
def test_request_is_recorded_only_if_it_was_served(ends: list[str]) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        # of one, so that one that leaks would be noticed
        recorder = Recorder(Settings(), str(path), SECRET, max_open=1)
        recorder.start()
        for end in ends:
            one = decision(3)
            recorder.note_decision(one, [prompt(1, 2, 3)])
            if end == "dropped":
                recorder.note_drop(one)
            told = {"served": outcome(), "error": outcome(status=503)}.get(end)
            recorder.end(one, told)
        recorder.close()
        served = ends.count("served") + ends.count("unknown")
        assert len(lines(path)) == recorder.recorded == served
        reasons = recorder.not_recorded_by_reason()
        assert (reasons["failed"], reasons["queue_full"]) == (len(ends) - served, 0)
