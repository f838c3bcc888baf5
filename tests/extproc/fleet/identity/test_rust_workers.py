"""A worker behind a Rust front end, from its refusals to what is certain of it; real sockets."""

from pathlib import Path

from extproc.base.engine import PYTHON, RUST
from extproc.requests.prompt import CONVERSATION, FRONT_END, TOOLS
from kvtools.simulator.server import running as simulated
from kvtools.simulator.settings import TINY_MODEL, Settings
from tests.extproc.fleet.proof.test_verifying import Before
from tests.waiting import until

OTHER = (TINY_MODEL / "chat_template.jinja").read_text().replace("user", "person") + "!"


async def test_conversations_of_a_rust_front_end_are_certain_once_they_are_proved() -> None:
    async with (
        simulated(Settings(rust_front_end=True)) as engine,
        Before(engine.endpoint) as router,
    ):
        (record,) = router.workers.records.values()
        await until(lambda: record.engine is not None, "its engine is known")
        assert record.engine is not None
        assert record.engine.front_end == RUST
        assert router.workers.candidates.dialects_of("tiny").first.is_rust
        await until(lambda: record.proof.is_proved(FRONT_END | CONVERSATION), "it is proved")
        (shown,) = router.workers.states.statuses()
        assert shown["engine"]["frontend"] == RUST


async def test_difference_is_blamed_on_the_front_end_and_not_on_the_template(
    tmp_path: Path,
) -> None:
    template = tmp_path / "other.jinja"
    template.write_text(OTHER)
    async with (
        simulated(Settings(rust_front_end=True, chat_template=template)) as engine,
        Before(engine.endpoint) as router,
    ):
        (record,) = router.workers.records.values()
        await until(lambda: bool(record.proof.refuted & FRONT_END), "it is refuted")
        assert record.proof.refuted & (CONVERSATION | TOOLS | FRONT_END)
        assert "Rust front end renders this template" in record.proof.summary.reason
        assert "template is another one" not in record.proof.summary.reason


async def test_same_release_behind_python_is_read_by_the_release_s_own_rules() -> None:
    async with simulated(Settings()) as engine, Before(engine.endpoint) as router:
        (record,) = router.workers.records.values()
        await until(lambda: record.engine is not None, "its engine is known")
        assert record.engine is not None
        assert record.engine.front_end == PYTHON
        assert not router.workers.candidates.dialects_of("tiny").first.is_rust
