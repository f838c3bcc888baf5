"""What the live page shows when something is wrong, or somebody means harm."""

import pytest

from tests.e2e.system import running
from tests.extproc.admin.serving import serving
from tests.page.background import in_background
from tests.page.browser import Browser

pytestmark = pytest.mark.slow

EVIL = "<img src=x onerror=document.title='taken'>"


def test_a_dead_worker_and_a_router_that_is_away_are_shown_under_their_names(
    browser: Browser,
) -> None:
    with in_background(running(workers=2)) as system:
        browser.open(f"{system.it.admin}/")
        dead = system.it.workers[1].endpoint
        system.do(system.it.stop_worker(dead))
        browser.until(lambda: "stale" in browser.texts("#workers .pill"), "a feed is stale")
        row = browser.texts("#workers tr")[0]
        assert row.startswith(dead)
        assert "connection lost" in row
        assert browser.texts("#announcer") == [f"{dead} is stale"]
        system.do(system.it.stop_router())
        browser.until(
            lambda: "router away" in browser.texts("#connection")[0], "the router is away"
        )
        assert all("ERR_" in one for one in browser.complaints())  # of requests that failed


def test_hostile_names_are_text(browser: Browser) -> None:
    config = f'models: [{{name: "{EVIL}"}}]\nworkers: [{{endpoint: "127.0.0.1:1"}}]'
    with in_background(serving(config)) as served:
        served.do(served.it.route(40, EVIL))
        browser.open(f"{served.it.url}/")
        browser.until(lambda: browser.all("#last tbody tr"), "the last request")
        browser.until(lambda: browser.all("#prefix-rows tr"), "its prefix")
        for place in ("#workers", "#last-body", "#decision-list", "#prefix-rows"):
            assert EVIL in browser.one(place).text
        assert browser.all("img") == []
        assert browser.driver.title == "KVSteer"


def test_an_empty_router_says_what_to_do(browser: Browser) -> None:
    with in_background(serving()) as served:
        browser.open(f"{served.it.url}/")
        assert browser.texts("#last-body")[0].startswith("No request yet.")
        browser.until(
            lambda: browser.texts("#prefixes-summary") == ["No prompts yet."], "no prompts"
        )
