"""The pictures of the documentation, from agents' traffic: `python -m tests.page.pictures FOLDER`.

Half of the conversations are steered, then all. Each picture is taken in light and in dark, of the
live page on a desktop and on a phone, and of the report. It takes about eight minutes.
"""

import asyncio
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from tests.agents import prose
from tests.page.background import Background, in_background
from tests.page.browser import Browser, running_browser
from tests.page.steps import report_of, steer
from tests.system.streamed_agents import MESSAGES, RESPONSES, Agent
from tests.system.system import System, running

# For each step, the percentage of steered requests, and how many seconds it lasts.
# Intervals need both sides in six minutes of the clock.
STEPS = (*[(50, 30)] * 10, (100, 30))
AGENTS = 10
TURNS = 8
THINK_SECONDS = 1.0
CHANGES = {"accounting": {"responses": "usage"}, "steering": {"percent": 0}}
WORKERS: dict[str, Any] = {
    "prefill_tokens_per_second": 8_000.0,
    "decode_tokens_per_second": 200.0,
    "blocks": 4_096,
    "max_model_len_tokens": 65_536,
    "host_blocks": 1_024,
}
RULES = {MESSAGES: prose(1_500, "messages"), RESPONSES: prose(1_200, "responses")}

# The width and the height of each picture.
PAGES = {"page-desktop": (1280, 1240), "page-phone": (360, 1400)}
REPORT = {"report": (1200, 1250)}
SCHEMES = {"light": "", "dark": "-dark"}


def names() -> list[str]:
    """The files that are made."""
    return [f"{name}{suffix}.png" for name in PAGES | REPORT for suffix in SCHEMES.values()]


def main(
    folder: Path, steps: Sequence[tuple[int, float]] = STEPS, think_seconds: float = THINK_SECONDS
) -> None:
    """Sends the traffic, and takes the pictures."""
    fleet = running(workers=3, changes=CHANGES, **WORKERS)
    with in_background(fleet) as system, running_browser() as browser:
        traffic = _Traffic(system.it, think_seconds)
        for percent, seconds in steps:
            system.do(steer(system.it, percent))
            system.do(traffic.work(seconds))
        print(system.do(report_of(system.it)), flush=True)
        system.do(traffic.work(2))  # the last decisions are of agents, whole turns
        for scheme, suffix in SCHEMES.items():
            browser.prefer(prefers_color_scheme=scheme)
            for name, size in PAGES.items():
                _take_page(browser, system, size, folder / f"{name}{suffix}.png")
            for name, size in REPORT.items():
                _take_report(browser, system, size, folder / f"{name}{suffix}.png")


class _Traffic:
    """Agents, each conversation with a number of its own; they pause before each turn."""

    def __init__(self, system: System, think_seconds: float) -> None:
        self._system = system
        self._think_seconds = think_seconds
        self._numbers = itertools.count()

    async def work(self, seconds: float) -> None:
        """Lets agents work for some time; their last conversations end with all their turns."""
        until = time.monotonic() + seconds
        await asyncio.gather(*(self._converse_until(until) for _ in range(AGENTS)))

    async def _converse_until(self, until: float) -> None:
        while time.monotonic() < until:
            number = next(self._numbers)
            path = (MESSAGES, RESPONSES)[number % 2]
            asks = f"Task {number}: list the files. {prose(80, number)}"
            agent, rng = Agent(path, RULES[path], asks), Random(number)
            for turn in range(TURNS):
                text, result = prose(40, (number, turn)), prose(160, (turn, number))
                asked = f"And then? {text}"
                await agent.turn(self._system.session, self._system.envoy, asked, result)
                await asyncio.sleep(rng.expovariate(1 / self._think_seconds))


def _take_page(
    browser: Browser, system: Background[System], size: tuple[int, int], to: Path
) -> None:
    browser.size(size[0], 900)
    browser.open(f"{system.it.admin}/")
    browser.until(lambda: browser.all("#last tbody tr"), "the last request")
    browser.until(lambda: browser.all("#prefix-rows tr"), "prefixes")
    browser.until(lambda: browser.all("#workers path"), "a history")
    to.write_bytes(browser.picture(*size))


def _take_report(
    browser: Browser, system: Background[System], size: tuple[int, int], to: Path
) -> None:
    browser.size(size[0], 1000)
    browser.driver.get(f"{system.it.admin}/report")
    to.write_bytes(browser.picture(*size))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
