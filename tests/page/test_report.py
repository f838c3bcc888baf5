"""The report in a real browser, under the policy that it is served with."""

import pytest

from tests.page.background import Background
from tests.page.browser import Browser
from tests.system.system import System, chat, long_text

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_report_is_drawn_in_light_and_dark_without_an_error(
    browser: Browser, system: Background[System], scheme: str
) -> None:
    status, _, _ = system.do(system.it.send(chat(long_text(f"report {scheme}"))))
    assert status == 200
    browser.prefer(prefers_color_scheme=scheme)
    browser.driver.get(f"{system.it.admin}/report")
    # the longer windows have no more requests than the first, so they are not drawn again
    assert browser.texts("h2") == ["The last 10 minutes", "How to read it"]
    ground = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(246, 247, 248)", "dark": "rgb(17, 22, 27)"}[scheme]
    wide = "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
    for width in (1280, 390):
        browser.size(width, 900)
        assert browser.run(wide)


def test_page_links_to_the_report(browser: Browser, system: Background[System]) -> None:
    browser.open(f"{system.it.admin}/")
    browser.click('nav a[href="/report"]')
    browser.until(lambda: browser.texts("h1") == ["KVSteer report"], "the report")
