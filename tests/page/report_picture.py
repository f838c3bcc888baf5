"""The picture of a report for the documentation: `python -m tests.page.report_picture FILE`.

It shows the walk through the demo of docs/prove-it.md, on the same simulated workers: none of the
requests is steered, then half of them, then all. It takes nine minutes, and prints each report.
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

from tests.page.background import Background, in_background
from tests.page.browser import Browser, running_browser
from tests.system.system import System, running

# For each step, the percentage of steered requests, and how many seconds it lasts.
STEPS = ((0, 60), (50, 360), (100, 60))
CHANGES = {"accounting": {"responses": "usage"}, "steering": {"percent": 0}}
SPEEDS: dict[str, Any] = {"prefill_tokens_per_second": 8_000.0, "decode_tokens_per_second": 200.0}


async def _steer(system: System, percent: int) -> None:
    async with system.session.post(f"{system.admin}/steering", json={"percent": percent}) as answer:
        answer.raise_for_status()


async def _report(system: System) -> str:
    async with system.session.get(f"{system.admin}/report?format=text") as answer:
        return await answer.text()


async def _traffic(url: str, seconds: int) -> None:
    """Runs `kvsteer traffic` as docs/prove-it.md does."""
    options = ("traffic", "--url", url, "--seconds", str(seconds))
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "extproc", *options)
    assert await process.wait() == 0


def _take(browser: Browser, system: Background[System], to: Path) -> None:
    browser.prefer(prefers_color_scheme="light")
    browser.size(1200, 1000)
    browser.driver.get(f"{system.it.admin}/report")
    to.write_bytes(browser.picture(1200, 1430))


def main(to: Path) -> None:
    """Sends the traffic of all steps, and takes the picture."""
    fleet = running(workers=3, changes=CHANGES, **SPEEDS)
    with in_background(fleet) as system, running_browser() as browser:
        for percent, seconds in STEPS:
            system.do(_steer(system.it, percent))
            asyncio.run(_traffic(system.it.envoy, seconds))
            print(f"{percent} % steered:", system.do(_report(system.it)), sep="\n", flush=True)
        _take(browser, system, to)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
