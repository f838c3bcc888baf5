"""What the demo, and the commands that it prints, say of it: one figure under one name."""

import asyncio
import re
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from typing import NamedTuple

import aiohttp
import pytest
import pytest_asyncio

from kvtools.demo.demo import DECODE_SPEED, PREFILL_SPEED, DemoAddresses, running
from kvtools.demo.demo_workload import COMPARED, CONTESTANTS, TURNS, compare
from tests.page.browser import CHROMIUM, DRIVER, MISSING, running_browser
from tests.ports import free_port
from tests.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
    pytest.mark.slow,
]

# The columns of the report and the rows of `as recorded`, by the demo's contestants.
COLUMNS = {"KVSteer": "steered", "hash by session": "not steered", "round robin": "cache-unaware"}
RECORDED = {
    "KVSteer": "cost",
    "hash by session": "Envoy's own choice",
    "round robin": "round_robin",
}


class Demo(NamedTuple):
    """A demo that has compared its contestants, and what it printed of them."""

    place: DemoAddresses
    shown: str

    def column(self, name: str) -> dict[str, str]:
        """A column of its table by contestant."""
        heads, *rows = [
            re.split(r"  +", line.strip()) for line in self.shown.splitlines() if "  " in line
        ]
        return {row[0]: row[1 + heads.index(name)] for row in rows}

    async def run(self, *words: str) -> str:
        """What a command of kvsteer prints."""
        command = [sys.executable, "-m", "extproc", *words]
        asked = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
        shown, _ = await asked.communicate()
        assert asked.returncode == 0
        return shown.decode()

    async def fleet(self) -> list[tuple[float, float]]:
        """Of the fleet's history: prompt tokens and held ones, answered tokens and cached ones."""
        pairs = (("prompt_tokens", "predicted_tokens"), ("answered_tokens", "reported_tokens"))
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.place.admin}/history") as response,
        ):
            fleet = (await response.json())["fleet"] or {}
        sums = {key: sum(filter(None, fleet.get(key, ()))) for pair in pairs for key in pair}
        return [(sums[whole], sums[part]) for whole, part in pairs]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def demo() -> AsyncIterator[Demo]:
    async with running(3, free_port()) as place:
        shown = await compare(place.envoy, place.admin, place.replays, "tiny")
        played = Demo(place, shown)
        assert list(played.column("cached share")) == [one.name for one in CONTESTANTS], shown

        async def is_sampled() -> bool:
            (placed, _), (answered, _) = await played.fleet()
            return placed == answered > 0

        await until(is_sampled, "the page and top have all requests")
        yield played


def percent(text: str) -> int:
    """The first percentage in a text, as a whole number."""
    found = re.search(r"(\d+(?:\.\d+)?) ?%", text)
    assert found, text
    return round(float(found[1]))


async def test_conversations_find_more_cached_when_they_are_kept_together(demo: Demo) -> None:
    shares = {name: percent(share) for name, share in demo.column("cached share").items()}
    assert shares["round robin"] + 10 < min(shares["KVSteer"], shares["hash by session"])


async def test_report_has_the_demos_table(demo: Demo) -> None:
    lines = (await demo.run("report", "--url", demo.place.admin)).splitlines()
    rows = {line.split("  ")[0]: re.split(r"  +", line)[1:] for line in lines}
    heads = next(re.split(r"  +", line.strip()) for line in lines if "not steered  " in line)
    for name, column in COLUMNS.items():
        at = next(at for at, head in enumerate(heads) if head.startswith(column))
        assert rows["requests"][at] == str(COMPARED * TURNS)
        for figure in ("cached share", "time to first byte p90", "busiest worker to mean"):
            row = next(cells for key, cells in rows.items() if key.startswith(figure))
            assert row[at].startswith(demo.column(figure)[name].replace("%", " %")), figure
    said = [percent(part) for part in re.split(r"cached, the others|cache-unaware", lines[1])]
    assert said == [percent(demo.column("cached share")[name]) for name in COLUMNS]


# How far a share of one decimal may be from the same one without, each rounded by itself.
ROUNDED = 0.56


async def test_whatif_shows_what_was_recorded_as_the_demo_and_the_rest_as_simulated(
    demo: Demo,
) -> None:
    fleet = ["--workers", "3", "--speed", str(PREFILL_SPEED), "--decode", str(DECODE_SPEED)]

    async def recorded() -> list[str]:
        found = await demo.run("whatif", demo.place.recording, *fleet, "--seeds", "1")
        return found.splitlines()

    lines = await recorded()
    at = next(at for at, line in enumerate(lines) if line.startswith("as recorded"))
    assert "cached share" in lines[at]
    assert not any("cached share" in line for line in lines[:at])
    for name, placed_by in RECORDED.items():
        row = next(line for line in lines[at:] if line.startswith(placed_by))
        share = re.search(r"([\d.]+)%", row)
        assert share is not None
        shown = percent(demo.column("cached share")[name])
        assert abs(float(share[1]) - shown) <= ROUNDED  # one has a digit more
        assert float(row.split()[-3]) > 0  # answers are streamed, so there are times
    assert lines[-1].startswith("How many workers fewer would do is not said: ")


async def test_top_shows_the_shares_of_steered_requests(demo: Demo) -> None:
    head = (await demo.run("top", "--once", "--admin", demo.place.admin)).splitlines()[0]
    held, cached = re.findall(r"(\d+)% of prompt tokens certainly held, cached share (\d+)%", head)[
        0
    ]
    assert int(cached) == percent(demo.column("cached share")["KVSteer"])
    (placed, certain), _ = await demo.fleet()
    assert int(held) == round(100 * certain / placed)


async def test_page_shows_the_shares_of_steered_requests(demo: Demo) -> None:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip(MISSING)

    def seen() -> dict[str, str]:
        with running_browser() as browser:
            browser.open(f"{demo.place.admin}/")
            browser.until(lambda: "%" in browser.texts("#gain-rate")[0], "the cached share")
            shown = zip(browser.texts("#gain dt"), browser.texts("#gain dd"), strict=True)
            return dict(shown)

    found = await asyncio.to_thread(seen)
    share = percent(found["Cached share of prompt tokens"])
    assert share == percent(demo.column("cached share")["KVSteer"])
    (placed, certain), _ = await demo.fleet()
    assert percent(found["Certainly held at the pick"]) == round(100 * certain / placed)
