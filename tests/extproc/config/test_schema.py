from dataclasses import dataclass, fields

from extproc.base.engine import Engine, Release
from extproc.config.schema import Config, Model, WorkerEngine, WorkerSettings
from extproc.config.sections import MAX_BYTES, MAX_MS, MAX_NUMBER, largest_number, setting


@dataclass(frozen=True)
class Section:
    needed: str = setting("must be given")
    size_bytes: int = setting("a number", 3, minimum=1)
    parts: list[int] = setting("made anew", list)


def test_key_has_its_default_and_bounds() -> None:
    section = Section("x")
    assert (section.size_bytes, section.parts) == (3, [])
    assert [item.metadata["minimum"] for item in fields(Section)] == [0, 1, 0]
    assert fields(Section)[0].metadata["doc"] == "must be given"


def test_number_bounds_fit_timers_and_memory() -> None:
    assert largest_number("ranks") == MAX_NUMBER
    assert largest_number("drain_ms") == MAX_MS
    assert largest_number("sent_bytes") == MAX_BYTES


def test_model_of_a_worker_is_its_own_or_the_first() -> None:
    config = Config(models=(Model("m"), Model("n")))
    assert config.model_of(WorkerSettings("10.0.0.1:1")) == "m"
    assert config.model_of(WorkerSettings("10.0.0.1:1", model="n")) == "n"


def test_engine_of_a_worker_is_known_by_its_release() -> None:
    assert WorkerEngine("vllm", "0.32.0").engine == Engine("vllm", Release(0, 32))
    assert WorkerEngine("vllm", "latest").engine is None
