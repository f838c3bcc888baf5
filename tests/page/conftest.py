from collections.abc import Iterator

import pytest

from tests.page.background import Background, in_background
from tests.page.browser import CHROMIUM, DRIVER, MISSING, Browser, running_browser
from tests.system.system import System, running


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip(MISSING)
    with running_browser() as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """The browser at desktop size, in light mode; no page may write to its console."""
    chromium.size(1280, 900)
    chromium.prefer(prefers_color_scheme="light", prefers_reduced_motion="no-preference")
    chromium.complaints()
    yield chromium
    complaints = chromium.complaints()
    chromium.driver.get("about:blank")
    assert complaints == []


@pytest.fixture(scope="module")
def system(chromium: Browser) -> Iterator[Background[System]]:
    with in_background(running(workers=3)) as one:
        yield one
