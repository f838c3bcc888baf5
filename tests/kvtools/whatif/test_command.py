import argparse
import contextlib
import io
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree as ET

import pytest

from extproc.__main__ import main
from extproc.base.errors import ConfigError, StartError
from extproc.config.policies import POLICIES, Ranking, by_chance
from kvtools.simulator.settings import TINY_MODEL
from kvtools.whatif import command
from kvtools.whatif.routers import ENVOY
from tests.kvtools.whatif.here import Here


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "ProcessPoolExecutor", Here)


def parsed(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


def said(*arguments: str) -> str:
    out = io.StringIO()
    assert command.run(parsed(*arguments), out) == 0
    return out.getvalue()


def figures(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(*arguments, "--json"))
    return found


def written(path: Path, lines: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Ten conversations of six turns, whose prompts grow by one block of 512 tokens per turn."""
    lines = [
        {
            "timestamp": 2_000 * turn + 150 * chat,
            "input_length": 512 * (turn + 4),
            "output_length": 50,
            "hash_ids": [100 * chat + block for block in range(turn + 4)],
        }
        for turn in range(6)
        for chat in range(10)
    ]
    return written(tmp_path / "trace.jsonl", lines)


def test_whatif_plays_each_policy_and_says_why_it_spares_no_worker(trace: str) -> None:
    lines = said(trace, "--workers", "4", "--seeds", "1").splitlines()
    table = {line[:22].strip(): line for line in lines}
    ours = {"cost", "cache_aware", "prefix_cache", "least_request", "round_robin", "random"}
    assert {*ours, *ENVOY} <= set(table)
    assert "12000 prompt tokens a second (assumed)" in "\n".join(lines)
    assert lines[-1].startswith("How many workers fewer would do is not said: no 100 recorded")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("slower", "says"), [(1.0, "keeps that of Envoy"), (2.0, "not said: the")])
def test_whatif_spares_workers_where_recorded_times_agree_with_simulated_ones(
    trace: str, tmp_path: Path, slower: float, says: str
) -> None:
    options = ("--workers", "4", "--policy", "cost", "--seeds", "1")
    lines = [json.loads(line) for line in Path(trace).read_text().splitlines()]
    twice = [one | {"timestamp": one["timestamp"] + at} for one in lines for at in (0, 60_000)]
    ours = figures(written(tmp_path / "twice", twice), *options)["policies"]["cost"]
    for at, one in enumerate(twice):
        seconds = ours["p90" if at % 10 > 6 else "p50"]
        one |= {"ttft_ms": 1_000 * slower * seconds, "placed_by": "cost"}
    shown = said(written(tmp_path / "timed", twice), *options).splitlines()
    assert says in shown[-1]
    assert next(line for line in shown if line.startswith("as recorded")).endswith("requests")


@pytest.mark.usefixtures("here")
def test_whatif_shows_the_prefixes_that_envoy_misses(trace: str) -> None:
    found = figures(trace, "--workers", "4", "--speed", "8000", "--policy", "cost")
    assert found["prefill_source"] == "as given"
    # each chat has 4 + 5 + ... + 9 blocks: all but the first 4 and one per later turn are cached
    assert found["policies"]["cost"]["hit_rate"] == pytest.approx(30 / 39, abs=0.02)
    assert found["policies"]["Envoy least_request"]["hit_rate"] < 0.6
    assert list(found["policies"]) == ["cost", *ENVOY]
    assert (
        found["fewest_workers"]["sentence"]
        == said(trace, "--workers", "4", "--speed", "8000", "--policy", "cost").splitlines()[-1]
    )


@pytest.mark.usefixtures("here")
def test_envoy_keeps_sessions_together_that_clients_name_or_whatif_derives(
    trace: str, tmp_path: Path
) -> None:
    options = ("--workers=4", "--policy=cost", "--seeds=1")
    derived = "No line names a session"
    assert derived in said(trace, *options)
    share = figures(trace, *options)["policies"]["Envoy ring_hash"]["hit_rate"]
    assert share == pytest.approx(30 / 39, abs=0.02)
    lines = [json.loads(line) for line in Path(trace).read_text().splitlines()]
    named = written(
        tmp_path / "named.jsonl",
        [{**line, "session_header": f"s{number % 10}"} for number, line in enumerate(lines)],
    )
    assert derived not in said(named, *options)
    assert figures(named, *options)["policies"]["Envoy maglev"]["hit_rate"] > 0.7


@pytest.mark.usefixtures("here")
def test_requests_that_share_nothing_are_not_played_by_session(tmp_path: Path) -> None:
    lines = [{"time": at, "prompt_tokens": 400, "completion_tokens": 9} for at in range(20)]
    path = written(tmp_path / "log.jsonl", lines)
    found = figures(path, "--workers=2", "--policy=cost", "--seeds=1")
    assert list(found["policies"]) == ["cost", "Envoy least_request", "Envoy round_robin"]


@pytest.mark.usefixtures("here")
def test_speedup_of_a_trace_lengthens_its_waits(trace: str) -> None:
    slow, fast = (
        figures(
            trace, "--workers", "2", "--policy", "least_request", "--seeds", "1", f"--rate={rate}"
        )
        for rate in (0.5, 8)
    )
    name = "least_request"
    assert slow["policies"][name]["p90"] < fast["policies"][name]["p90"]
    assert slow["policies"][name]["throughput"] < fast["policies"][name]["throughput"]


@pytest.mark.usefixtures("here")
def test_more_routers_and_smaller_caches_lower_the_hit_rate(trace: str) -> None:
    options = (trace, "--workers=4", "--policy=cost", "--seeds=1", "--block-size=512")
    whole = figures(*options)["policies"]["cost"]["hit_rate"]
    assert figures(*options, "--cache-blocks=12")["policies"]["cost"]["hit_rate"] < whole - 0.2
    assert figures(*options, "--routers=3")["policies"]["cost"]["hit_rate"] > whole - 0.1


@pytest.mark.usefixtures("here")
def test_picture_shows_each_policy_at_several_numbers_of_workers(
    trace: str, tmp_path: Path
) -> None:
    file = tmp_path / "whatif.svg"
    said(trace, "--workers=4", "--policy=cost", "--seeds=1", f"--svg={file}")
    found = ET.fromstring(file.read_text())
    texts = {one.text for one in found.iter() if one.tag.endswith("text")}
    assert {"cost", "Envoy round_robin", "4 workers", "3 workers", "2 workers"} <= texts


@pytest.mark.usefixtures("here")
def test_requests_with_bodies_are_tokenized(tmp_path: Path) -> None:
    bodies: list[dict[str, Any]] = [
        {"messages": [{"role": "user", "content": "of one matter " * 40}]},
        {"prompt": "of another one"},
        {"messages": [{"role": "user", "content": "of one matter " * 40 + "?"}]},
        {"input": "embeddings", "path": "/v1/audio/speech", "body": {"input": "x"}},
    ]
    path = written(
        tmp_path / "bodies.jsonl", [{"time": at, **one} for at, one in enumerate(bodies)]
    )
    found = figures(path, f"--tokenizer={TINY_MODEL}", "--policy=cost", "--workers=1", "--seeds=1")
    assert found["requests"] == 3
    assert found["block_size"] == 16
    assert found["policies"]["cost"]["hit_rate"] > 0.3
    text = said(path, f"--tokenizer={TINY_MODEL}", "--policy=cost", "--seeds=1")
    assert "1 lines are not played" in text
    assert "3 lines do not tell how long their answer was: 128 tokens are assumed." in text
    config = written(
        tmp_path / "kvsteer.yaml",
        [{"models": [{"name": "tiny", "tokenizer": str(TINY_MODEL)}],
          "workers": [{"endpoint": "10.0.0.1:1"}]}],
    )  # fmt: skip
    assert figures(path, f"--config={config}", "--policy=cost", "--seeds=1")["requests"] == 3


@pytest.mark.usefixtures("here")
def test_access_log_is_played_with_its_missing_facts_named(tmp_path: Path) -> None:
    line = {"time": "2026-01-01T00:00:00Z", "prompt_tokens": 900, "completion_tokens": 9}
    text = said(written(tmp_path / "log", [line] * 5), "--policy=cost", "--seeds=1")
    assert "5 lines do not tell what they share: nothing is assumed to be shared." in text


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["none.jsonl"], "none.jsonl: No such file or directory"),
        (["wrong.jsonl"], "wrong.jsonl, line 2: Expected `object`, got `int`"),
        (["empty.jsonl"], "empty.jsonl: no request in it to play"),
        (["trace.jsonl", "--block-size=100"], "blocks of 512 tokens cannot be played"),
        (["trace.jsonl", "--speed=learned", "--admin=127.0.0.1:1"], "Connection refused"),
        (["trace.jsonl", "--seeds=1", "--policy=cost", "--svg=none/x.svg"], "No such file"),
        (["trace.jsonl", "--tokenizer=nowhere"], "nowhere"),
    ],
)  # fmt: skip
def test_start_error_names_the_fault_of_a_trace(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], fault: str
) -> None:
    assert trace
    (tmp_path / "wrong.jsonl").write_text('{"time": 1, "prompt_tokens": 1}\n3\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(StartError, match=fault):
        said(*arguments)


def test_configuration_faults_are_raised(trace: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        said(trace, f"--config={written(tmp_path / 'x.yaml', [{'models': 3}])}")


@pytest.mark.parametrize(
    "option",
    ["--workers=0", "--workers=x", "--speed=-1", "--speed=fast", "--rate=inf", "--policy=best"],
)
def test_malformed_options_are_refused(option: str) -> None:
    with pytest.raises(SystemExit) as refused:
        parsed("trace.jsonl", option)
    assert refused.value.code == 2


@pytest.mark.usefixtures("here")
def test_policy_that_reads_a_header_is_not_played(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reading = Ranking(by_chance, reads_header="header")
    monkeypatch.setitem(cast("dict[str, Ranking]", POLICIES), "random", reading)
    played = figures(trace, "--workers=2", "--seeds=1", "--first=5")["policies"]
    assert "cost" in played
    assert "random" not in played
    with pytest.raises(SystemExit):
        parsed(trace, "--policy=random")
    assert "invalid choice: 'random'" in capsys.readouterr().err


@contextlib.contextmanager
def serving(workers: object) -> Iterator[str]:
    """The URL of an admin server that shows these workers."""

    class Workers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(workers).encode())

        def log_message(self, *_: Any) -> None:
            """Logs nothing."""

    with HTTPServer(("127.0.0.1", 0), Workers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("here")
def test_learned_speed_of_a_router_is_used(trace: str) -> None:
    options = (trace, "--speed=learned", "--policy=cost", "--seeds=1")
    known = [(9_000, 0.5), (3_000, 0.0), (5_000, 1.0)]
    words = ("tokens_per_second", "confidence", "used_tokens_per_second")
    shown = [{"speed": dict(zip(words, (*one, 8_000), strict=True))} for one in known]
    with serving(shown) as url:
        found = figures(*options, f"--admin={url}")
    assert found["prefill_tokens_per_second"] == 7_000.0
    assert found["prefill_source"] == "learned, the median of 2 workers"
    for workers, fault in (
        (shown[1:2], "has been learned yet"),
        ([{}], "does not match this version"),
    ):
        with serving(workers) as url, pytest.raises(StartError, match=fault):
            figures(*options, f"--admin={url}")


def test_progress_bar_is_drawn_on_a_terminal(trace: str) -> None:
    run = [sys.executable, "-m", "extproc", "whatif", trace, "--policy=cost", "--seeds=1"]
    reader, terminal = pty.openpty()
    done = subprocess.run(run, check=True, stdout=subprocess.PIPE, stderr=terminal)
    os.close(terminal)
    assert b"cost" in done.stdout
    assert b"\r[" not in done.stdout
    assert b"\r[" in os.read(reader, 65_536)
    os.close(reader)


@pytest.mark.usefixtures("here")
def test_no_progress_bar_is_drawn_elsewhere(trace: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["whatif", trace, "--policy=cost", "--seeds=1"]) == 0
    written = capfd.readouterr()
    assert "cost" in written.out
    assert "\r[" not in written.out
    assert written.err == ""


def test_killed_process_ends_the_plays_and_is_reported(trace: str) -> None:
    arguments = parsed(trace, "--workers", "2")
    recorded, _ = command.recording_of(arguments, None)
    plan = command.plan_of(arguments, None, recorded)
    with command.Runs(plan.arrivals, 1, io.StringIO()) as runs:
        killed = runs.pool.submit(os._exit, 9)
        assert isinstance(killed.exception(timeout=60), BrokenProcessPool)
        with pytest.raises(StartError, match="was killed; is there too little memory"):
            runs.play(plan.stage(2), plan.contestants, 1)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("owner", ["user", None])
def test_cost_of_isolation_is_told_for_the_tenants_of_a_trace(
    tmp_path: Path, owner: str | None
) -> None:
    lines = [
        {
            "timestamp": 500 * number,
            "input_length": 4_096,
            "output_length": 10,
            "hash_ids": [*range(8)],
            **({owner: f"u{number % 4}"} if owner else {}),
        }
        for number in range(8)
    ]
    options = (written(tmp_path / "t", lines), "--workers=1", "--seeds=1", "--policy=cost")
    found = figures(*options, "--tenants")["isolation"]
    if owner is None:
        assert "is not known" in found["sentence"]
        return
    assert found["sentence"] == said(*options, "--tenants").splitlines()[-1]
    # one of eight prompts is computed if all share, four of eight if four tenants do not; of the
    # others, an engine computes the last of 32 blocks
    assert (
        "With 4 tenants apart, cost has a hit share of 48.4% instead of 84.8%"
        in (found["sentence"])
    )
