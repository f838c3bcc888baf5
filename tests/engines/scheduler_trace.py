"""What a real vLLM engine's scheduler did, by its own clock: see traced/sitecustomize.py."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A request as the scheduler saw it; times are seconds of the engine's clock."""

    begun_at: float
    ended_at: float
    priority: int
    answer_tokens: int

    @property
    def seconds(self) -> float:
        """From the scheduler's queue to its end."""
        return self.ended_at - self.begun_at


class SchedulerTrace:
    """Reads the trace of one engine. environment: what the engine needs for it."""

    def __init__(self, directory: Path) -> None:
        self._file = directory / "scheduler.jsonl"
        self._read_bytes = 0
        self._begun: dict[str, float] = {}
        self._ended: list[Scheduled] = []
        traced = Path(__file__).with_name("traced")
        self.environment = {
            "KVSTEER_SCHEDULER_TRACE": str(self._file),
            "PYTHONPATH": str(traced),
        }

    def held(self) -> int:
        """How many requests the scheduler has now."""
        self._read()
        return len(self._begun)

    def news(self) -> list[Scheduled]:
        """The requests that ended since the last call."""
        self._read()
        ended, self._ended = self._ended, []
        return ended

    def _read(self) -> None:
        text = self._file.read_bytes()[self._read_bytes :]
        text = text[: text.rfind(b"\n") + 1]  # the last line may not be whole
        self._read_bytes += len(text)
        for line in text.splitlines():
            one: dict[str, Any] = json.loads(line)
            if one["event"] == "begin":
                self._begun[one["request"]] = one["at"]
                continue
            at = self._begun.pop(one["request"])
            self._ended.append(Scheduled(at, one["at"], one["priority"], one["answer_tokens"]))
