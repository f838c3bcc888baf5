"""Every benchmark still runs: with --smoke, each row once, without a judgement of goals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
FIELDS = {"what", "ours", "reference", "ratio", "goal", "met"}

# Each benchmark with its options, and the programs without which it has no rows.
SMOKES = {
    "ablation.py": ["--only", "siblings"],
    "attack.py": ["--only", "isolation"],
    "budget.py": [],
    "extproc.py": [],
    "extproc_counts.py": [],
    "feeds.py": [],
    "hand_tokens.py": [],
    "in_code.py": [],
    "index.py": [],
    "judge.py": ["--contestant", "KVSteer, lean", "--contestant", "RING_HASH, 150 %"],
    "media.py": [],
    "misses.py": [],
    "misses_cost.py": [],
    "peers.py": ["--only", "speed"],
    "probe_cost.py": [],
    "processes.py": [],
    "routing.py": [],
    "routing_closed.py": [],
    "routing_advice.py": [],
    "routing_held.py": [],
    "routing_hybrids.py": [],
    "routing_probe.py": [],
    "sharing.py": [],
    "sharing_counts.py": [],
    "soak.py": [],
    "start.py": [],
    "state.py": [],
    "tokens.py": [],
}
NEED_WRK = {"peers.py", "processes.py"}


def smoke(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / name), "--smoke", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMOKES)
def test_benchmark_runs_once(name: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    done = smoke(name, *SMOKES[name], "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(file.read_text())
    assert all(set(row) == FIELDS and row["met"] is None for row in rows)
    for row in rows:
        assert f"{row['what']}: " in done.stdout
    is_missing = "missing: wrk" in done.stdout and name in NEED_WRK
    assert rows or is_missing, done.stdout


def test_benchmarks_are_all_smoked() -> None:
    found = {
        file.name
        for file in BENCHMARKS.glob("*.py")
        if '__name__ == "__main__"' in file.read_text()
    }
    parts = {
        "attack_side.py",
        "extproc_idle.py",
        "feeds_follower.py",
        "feeds_publisher.py",
        "memory.py",
        "peers_kubernetes.py",
        "peers_render.py",
        "publisher.py",
        "routing_trace.py",
        "warm_publisher.py",
    }
    assert set(SMOKES) <= found <= set(SMOKES) | parts
