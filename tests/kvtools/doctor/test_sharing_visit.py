"""What the doctor says about routers that share."""

import sys
from pathlib import Path

import pytest

from extproc.config.schema import Config
from extproc.config.sections import SharingSettings
from kvtools.doctor.doctor import receive_reports, visit_sharing
from kvtools.doctor.findings import Severity
from tests.extproc.sharing.engine_process import needs_engine, running_engine
from tests.extproc.sharing.test_sharing import part, two
from tests.ports import free_port
from tests.waiting import until


async def test_visit_sharing_is_empty_without_sharing() -> None:
    assert await visit_sharing(Config(), 1.0) == []


@needs_engine
async def test_visit_sharing_names_each_router_with_the_age_of_its_last_message(
    tmp_path: Path,
) -> None:
    async with running_engine(tmp_path) as engine, part(url=engine.url, name="one"):
        (found,) = await visit_sharing(Config(sharing=SharingSettings(engine.url)), 1.0)
    assert found.verdict is Severity.RIGHT
    assert found.says.startswith("router one sent its last message ")


@pytest.mark.slow
async def test_visit_sharing_hears_a_router_that_sends_seldom(tmp_path: Path) -> None:
    sharing = SharingSettings(f"directory:{tmp_path}", tick_ms=700)
    async with part(url=sharing.url, name="one", tick_ms=700) as one:
        await until(lambda: one.sharing.sent, "it has sent a message")
        (found,) = await visit_sharing(Config(sharing=sharing), 1.0)
    assert found.says.startswith("router one sent its last message ")


@needs_engine
async def test_visit_sharing_finds_a_fleet_with_another_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("the secret of a fleet")
    async with (
        running_engine(tmp_path) as engine,
        part(url=engine.url, name="one", secret_file=str(tmp_path / "secret")),
    ):
        found = await visit_sharing(Config(sharing=SharingSettings(engine.url)), 1.0)
    assert [one.code for one in found] == ["sharing-unsealed", ""]
    assert found[1].says == "no other router was heard"


async def test_visit_sharing_finds_a_missing_engine(tmp_path: Path) -> None:
    sharing = SharingSettings(f"redis://127.0.0.1:{free_port()}")
    (found,) = await visit_sharing(Config(sharing=sharing), 0.5)
    assert found.code == "sharing-unreachable"
    missing = SharingSettings(sharing.url, secret_file=str(tmp_path / "none"))
    (found,) = await visit_sharing(Config(sharing=missing), 0.5)
    assert "No such file" in found.says


async def test_visit_sharing_names_a_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "libvalkey", None)
    (found,) = await visit_sharing(Config(sharing=SharingSettings("redis://127.0.0.1:1")), 0.5)
    shown = "sharing.url: needs the extra: pip install '.[sharing]' in a clone"
    assert (found.code, found.says) == ("extra-missing", shown)


async def test_overhear_lists_routers_without_joining_them(tmp_path: Path) -> None:
    options = SharingSettings(f"directory:{tmp_path}")
    async with two(url=options.url) as (one, other):
        heard = await receive_reports(options, 1.5)
        assert set(heard.heard_seconds) == {"one", "other"}
        assert max(heard.heard_seconds.values()) < 1.5
        assert not heard.fault
        assert len(one.sharing.others.peers) == len(other.sharing.others.peers) == 1
