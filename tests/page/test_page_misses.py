"""Why prompts were computed again, on the live page."""

import pytest

from tests.page.background import in_background
from tests.page.browser import Browser
from tests.system.routing.test_misses import MISSES, Conversation
from tests.system.system import running

pytestmark = pytest.mark.slow


def test_page_says_who_breaks_the_cache_and_what_it_costs(browser: Browser) -> None:
    changes = MISSES | {"misses": {"enabled": True, "worker_price_per_hour": 3.6}}
    with in_background(running(2, ("tiny",), changes)) as system:
        browser.open(f"{system.it.admin}/")
        one = Conversation(system.it, "parsers")
        for minute in range(4):
            one.clock = f"2026-11-30 12:0{minute}:13"
            system.do(one.turn())
        browser.until(lambda: "in 3 requests" in browser.texts("#breaks li")[0], "who breaks it")
        (worst,) = browser.texts("#breaks li")
        assert "in the system prompt, a date or time changed" in worst
        assert "computed again" in browser.texts("#misses-summary")[0]
        browser.click("#misses summary")
        (client,) = browser.texts("#miss-clients tr")
        assert "mostly changed" in client
        assert "price" in client
        assert len(browser.texts("#turns li")) == 4
        browser.driver.get("about:blank")


def test_page_without_the_feature_does_not_speak_of_it(browser: Browser) -> None:
    with in_background(running(1, ("tiny",))) as system:
        browser.open(f"{system.it.admin}/")
        browser.until(lambda: browser.texts("#workers .pill") == ["live"], "the page is drawn")
        assert browser.run("return document.getElementById('misses').hidden")
        browser.driver.get("about:blank")
