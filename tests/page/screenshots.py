"""Pictures of the live page for the documentation: `python -m tests.page.screenshots FOLDER`."""

import sys
from pathlib import Path

from tests.page.background import Background, in_background
from tests.page.browser import Browser, running_browser
from tests.system.system import System, chat, long_text, running
from tests.waiting import until

QUESTIONS = 4
TURNS = 4


def main(folder: Path) -> None:
    """Takes both pictures."""
    fleet = running(workers=3, prefill_tokens_per_second=20_000.0, host_blocks=64)
    with in_background(fleet) as system, running_browser() as browser:
        _send(system)
        browser.size(1280, 900)
        _take(browser, system, "light", (1280, 1180), folder / "page-desktop.png")
        browser.size(360, 780)
        _take(browser, system, "dark", (360, 1240), folder / "page-phone-dark.png")


def _send(system: Background[System]) -> None:
    for turn in range(TURNS):
        for question in range(QUESTIONS):
            text = f"{long_text(f'question {question}')} {'and then ' * turn}"
            _, worker, _ = system.do(system.it.send(chat(text)))
            system.do(system.it.learned(chat(text), worker))
        system.do(_stepped(system.it))


async def _stepped(system: System) -> None:
    """Waits for the next step of the history."""

    async def steps() -> int:
        async with system.session.get(f"{system.admin}/history") as response:
            return len((await response.json())["at"])

    before = await steps()

    async def more() -> bool:
        return await steps() > before

    await until(more, "a step of the history")


def _take(
    browser: Browser, system: Background[System], scheme: str, size: tuple[int, int], to: Path
) -> None:
    browser.prefer(prefers_color_scheme=scheme)
    browser.open(f"{system.it.admin}/")
    browser.until(lambda: browser.all("#last tbody tr"), "the last request")
    browser.until(lambda: browser.all("#prefix-rows tr"), "prefixes")
    browser.until(lambda: browser.all("#workers path"), "a history")
    to.write_bytes(browser.picture(*size))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
