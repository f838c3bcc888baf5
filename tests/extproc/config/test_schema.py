from dataclasses import dataclass, fields

from extproc.config.schema import Config, Model, Worker
from extproc.config.sections import MAX_BYTES, MAX_MS, MAX_NUMBER, key, most


@dataclass(frozen=True)
class Section:
    needed: str = key("must be given")
    size_bytes: int = key("a number", 3, minimum=1)
    parts: list[int] = key("made anew", list)


def test_a_key_has_its_default_and_what_is_allowed() -> None:
    section = Section("x")
    assert (section.size_bytes, section.parts) == (3, [])
    assert [item.metadata["minimum"] for item in fields(Section)] == [0, 1, 0]
    assert fields(Section)[0].metadata["doc"] == "must be given"


def test_a_number_has_room_in_timers_and_bytes_in_memory() -> None:
    assert most("ranks") == MAX_NUMBER
    assert most("drain_ms") == MAX_MS
    assert most("sent_bytes") == MAX_BYTES


def test_a_worker_serves_its_model_or_the_first_one() -> None:
    config = Config(models=(Model("m"), Model("n")))
    assert config.model_of(Worker("10.0.0.1:1")) == "m"
    assert config.model_of(Worker("10.0.0.1:1", model="n")) == "n"
