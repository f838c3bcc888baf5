"""The pictures of the documentation, from agents' traffic: `python -m tests.page.pictures FOLDER`.

Half of the conversations are steered, then all. Each picture is taken in light and in dark, of the
live page on a desktop and on a phone, and of the report. It takes about eight minutes.
"""

import asyncio
import itertools
import sys
import time
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

DESKTOP, PHONE, REPORT = (1280, 1240), (360, 1400), (1200, 1250)
SCHEMES = {"light": "", "dark": "-dark"}


def main(folder: Path) -> None:
    """Sends the traffic, and takes the pictures."""
    fleet = running(workers=3, changes=CHANGES, **WORKERS)
    with in_background(fleet) as system, running_browser() as browser:
        numbers = itertools.count()
        for percent, seconds in STEPS:
            system.do(steer(system.it, percent))
            system.do(_work(system.it, seconds, numbers))
        print(system.do(report_of(system.it)), flush=True)
        system.do(_work(system.it, 2, numbers))  # the last decisions are of agents, whole turns
        for scheme, suffix in SCHEMES.items():
            browser.prefer(prefers_color_scheme=scheme)
            _take_page(browser, system, DESKTOP, folder / f"page-desktop{suffix}.png")
            _take_page(browser, system, PHONE, folder / f"page-phone{suffix}.png")
            _take_report(browser, system, folder / f"report{suffix}.png")


async def _work(system: System, seconds: float, numbers: "itertools.count[int]") -> None:
    """Lets agents work for some time; their last conversations end with all their turns."""
    until = time.monotonic() + seconds

    async def works() -> None:
        while time.monotonic() < until:
            number = next(numbers)
            path = (MESSAGES, RESPONSES)[number % 2]
            asks = f"Task {number}: list the files. {prose(80, number)}"
            agent, rng = Agent(path, RULES[path], asks), Random(number)
            for turn in range(TURNS):
                text, result = prose(40, (number, turn)), prose(160, (turn, number))
                await agent.turn(system.session, system.envoy, f"And then? {text}", result)
                await asyncio.sleep(rng.expovariate(1 / THINK_SECONDS))

    await asyncio.gather(*(works() for _ in range(AGENTS)))


def _take_page(
    browser: Browser, system: Background[System], size: tuple[int, int], to: Path
) -> None:
    browser.size(size[0], 900)
    browser.open(f"{system.it.admin}/")
    browser.until(lambda: browser.all("#last tbody tr"), "the last request")
    browser.until(lambda: browser.all("#prefix-rows tr"), "prefixes")
    browser.until(lambda: browser.all("#workers path"), "a history")
    to.write_bytes(browser.picture(*size))


def _take_report(browser: Browser, system: Background[System], to: Path) -> None:
    browser.size(REPORT[0], 1000)
    browser.driver.get(f"{system.it.admin}/report")
    to.write_bytes(browser.picture(*REPORT))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
