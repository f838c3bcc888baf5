"""Recording without prompts, in a running router; and what such a recording predicts."""

import argparse
import asyncio
import io
import itertools
import json
import os
import signal
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvtools.whatif import command
from tests.kvtools.whatif.here import Here
from tests.ports import free_ports_apart
from tests.system.processes.test_processes import pids
from tests.system.system import System, chat, long_text, running
from tests.waiting import until

USAGE = {"responses": "usage"}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def has_lines(path: Path) -> bool:
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:  # for a moment, while it is replaced
        return False


async def recorded(system: System, count: int) -> None:
    async def are_there() -> bool:
        return await system.metric("kvsteer_recorded_total") == count

    await until(are_there, f"{count} requests are recorded")


async def test_recorder_writes_requests_without_their_prompts(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    changes = {"accounting": USAGE, "recorder": {"file": str(path), "block_size": 16}}
    async with running(changes=changes) as system:
        texts = [long_text("alpha"), long_text("alpha") + " and more", long_text("omega")]
        for text, session in zip(texts, ("one", "one", "two"), strict=True):
            headers = {"x-session-id": session}
            assert (await system.send(chat(text), headers=headers))[0] == 200
        assert (await system.send({**chat("x"), "messages": "wrong"}))[0] >= 400
        await recorded(system, len(texts))
    first, longer, other = lines(path)
    shared = len(first["hash_ids"]) - 2  # what ends the conversation differs
    assert first["hash_ids"][:shared] == longer["hash_ids"][:shared]
    assert not {*first["hash_ids"][2:]} & {*other["hash_ids"][2:]}
    assert [one["output_length"] for one in (first, longer, other)] == [4, 4, 4]
    assert first["input_length"] == pytest.approx(16 * len(first["hash_ids"]), abs=16)
    assert first["session_header"] == longer["session_header"] != other["session_header"]
    assert not {"alpha", "omega", "parser", "user", "one"} & {*path.read_text().split('"')}
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("isolates", [True, False])
async def test_whatif_tells_what_isolation_costs_on_a_recording(
    tmp_path: Path, *, isolates: bool
) -> None:
    path, secret = tmp_path / "trace.jsonl", tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    recorder = {"file": str(path), "block_size": 16}
    changes: dict[str, Any] = {"recorder": {**recorder, "tenant_header": "X-Tenant"}}
    if isolates:
        rules = {"header": "X-Tenant", "secret_file": str(secret)}
        changes = {"recorder": recorder, "isolation": rules}
    async with running(1, changes=changes) as system:
        for name in ("acme", "other", "acme"):
            body = chat(long_text("alpha"))
            assert (await system.send(body, headers={"x-tenant": name}))[0] == 200
        await recorded(system, 3)
    assert "acme" not in path.read_text()
    cost = whatif(str(path), "--workers=1", "--seeds=1", "--tenants")["isolation"]
    assert cost["tenants"] == 2
    assert cost["shared"]["hit_rate"] > cost["apart"]["hit_rate"] > 0


@pytest.mark.slow
async def test_recordings_of_several_processes_are_replayed_together(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    names = ("extproc", "admin", "metrics")
    changes: dict[str, Any] = {
        name: {"listen": f"127.0.0.1:{free_ports_apart(2)}"} for name in names
    }
    changes["extproc"]["processes"] = 2
    async with running(1, changes={**changes, "recorder": {"file": str(path)}}) as system:

        async def both_record() -> bool:  # Envoy takes turns
            assert (await system.send(chat(long_text("alpha"))))[0] == 200
            files = [path, path.with_name("trace.jsonl.1")]
            return all(map(has_lines, files))

        await until(both_record, "both processes record")
        os.kill(pids(system, 1)[0], signal.SIGKILL)
        older = path.with_name("trace.jsonl.1.old")

        async def records_again() -> bool:
            assert (await system.send(chat(long_text("alpha"))))[0] == 200
            return older.exists() and has_lines(path.with_name("trace.jsonl.1"))

        await until(records_again, "the process that was started anew records")
    files = [path, path.with_name("trace.jsonl.1"), older]
    every = [one for file in files for one in lines(file)]
    assert len({tuple(one["hash_ids"]) for one in every}) == 1
    # what was under way when the router was killed may have been written since
    assert whatif(*map(str, files), "--workers=1", "--seeds=1")["requests"] >= len(every)


async def test_recorder_without_a_writable_file_loses_no_request(tmp_path: Path) -> None:
    recorder = {"file": str(tmp_path / "none" / "trace.jsonl")}
    async with running(changes={"recorder": recorder}) as system:
        for number in range(3):
            assert (await system.send(chat(long_text(f"{number}"))))[0] == 200

        async def counted() -> bool:
            return await system.metric('kvsteer_not_recorded_total{reason="disk"}') == 3

        await until(counted, "what is lost is counted")
        assert system.log.read_text().count("requests are not recorded") == 1


# Prompt tokens that a simulated worker computes in a second: so few that the time that this machine
# itself takes for a request hardly matters, however busy it is.
SPEED = 150
WORKERS = 8


def facts(name: str, count: int) -> str:
    return " ".join(f"{name} fact {number} of the matter" for number in range(count))


class Talks:
    """Chats about one document each; the seconds that requests took, and their cached tokens."""

    def __init__(self, system: System) -> None:
        self._system = system
        self.taken: list[float] = []
        self.cached_tokens = self.tokens = 0

    async def hold(self, begin: float, name: str, rng: Random) -> None:
        await asyncio.sleep(begin)
        text = facts(name, rng.randint(50, 110))
        for turn in range(4):
            at = time.monotonic()
            status, _, answer = await self._system.send(chat(text, max_tokens=2))
            assert status == 200
            self.taken.append(time.monotonic() - at)
            self.cached_tokens += answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            self.tokens += answer["usage"]["prompt_tokens"]
            text += facts(f"{name} {turn}", 5)
            await asyncio.sleep(rng.uniform(1, 3))


@pytest.mark.slow
async def test_whatif_on_a_recording_predicts_what_happens(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    changes = {
        "accounting": USAGE,
        "recorder": {"file": str(path), "block_size": 16},
        "policy": {"cost": {"prefill_tokens_per_second": SPEED}},
    }
    rng = Random(7)
    begins = itertools.accumulate(rng.expovariate(0.28) for _ in range(18))
    async with running(WORKERS, changes=changes, prefill_tokens_per_second=SPEED) as system:
        talks = Talks(system)
        await asyncio.gather(
            *(talks.hold(at, f"chat {number}", Random(number)) for number, at in enumerate(begins))
        )
        await recorded(system, len(talks.taken))
        options = [f"--config={system.config_file}", f"--speed={SPEED}", "--decode=1000"]
        foretold = whatif(str(path), f"--workers={WORKERS}", "--seeds=8", *options)
    share, p90 = talks.cached_tokens / talks.tokens, sorted(talks.taken)[int(0.9 * 72)]
    ours, measured = foretold["policies"]["cost"], foretold["recorded"]["cost"]
    print(f"cached {share:.4f}, p90 {p90:.3f} s, {ours}, {measured}")  # shown if the test fails
    assert share > 0.5
    assert ours["hit_rate"] == pytest.approx(share, abs=0.03)
    assert ours["p90"] == pytest.approx(p90, rel=0.15)
    assert measured["cached_share"] == pytest.approx(share, abs=0.001)
    assert measured["p90"] is None  # answers that are not streamed have no time to a first token


def whatif(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "ProcessPoolExecutor", Here)
        assert command.run(parser.parse_args([*arguments, "--policy", "cost", "--json"]), out) == 0
    found: dict[str, Any] = json.loads(out.getvalue())
    return found
