"""The live page in a real browser, of a running system."""

import json
import re
from importlib.metadata import version
from typing import Any

import pytest
from selenium.webdriver import ActionChains, Keys

from tests.page.background import Background, in_background
from tests.page.browser import Browser
from tests.system.screenshots import MODEL as SEEING_MODEL
from tests.system.screenshots import SEEING, Conversation
from tests.system.system import System, chat, long_text, running

pytestmark = pytest.mark.slow


def sent(system: Background[System], seed: str) -> str:
    """Sends one request; the worker that answered."""
    status, worker, _ = system.do(system.it.send(chat(long_text(seed))))
    assert status == 200
    return worker


def opened(browser: Browser, system: Background[System]) -> None:
    browser.open(f"{system.it.admin}/")


def press(browser: Browser, *keys: str) -> None:
    for key in keys:
        ActionChains(browser.driver).send_keys(key).perform()


def focused(browser: Browser) -> str:
    text_shown: str = browser.run("const e = document.activeElement; return e.id || e.tagName")
    return text_shown


def test_page_shows_the_fleet_with_the_state_of_every_feed(
    browser: Browser, system: Background[System]
) -> None:
    opened(browser, system)
    names = [text.splitlines()[0] for text in browser.texts("#workers th")]
    assert sorted(names) == sorted(worker.endpoint for worker in system.it.workers)
    assert browser.texts("#workers .pill") == ["live"] * 3
    assert browser.texts("#fleet-summary")[0].startswith("3 workers: 3 live · 0 requests in flight")


def test_page_explains_the_last_request_at_the_top(
    browser: Browser, system: Background[System]
) -> None:
    opened(browser, system)
    worker = sent(system, "told at the top")
    system.do(system.it.learned(chat(long_text("told at the top")), worker))
    assert sent(system, "told at the top") == worker
    reason = f"The router picked {worker} because it holds "
    browser.until(lambda: browser.texts("#last .verdict")[0].startswith(reason), "the reason")
    assert browser.texts("#last tbody th")[0].startswith(worker)
    assert len(browser.texts("#last tbody tr")) == 3


def test_decision_appears_and_opens_into_its_candidates(
    browser: Browser, system: Background[System]
) -> None:
    opened(browser, system)
    worker = sent(system, "opened")
    browser.until(lambda: worker in browser.texts("#decision-list summary")[0], "the decision")
    browser.click("#decision-list summary")
    browser.until(lambda: len(browser.texts("details[open] tbody tr")) == 3, "its candidates")
    assert browser.texts("details[open] .verdict")[0].startswith(
        f"The router picked {worker} because"
    )


def test_decision_list_stays_still_while_a_decision_is_read(
    browser: Browser, system: Background[System]
) -> None:
    sent(system, "read")
    opened(browser, system)
    browser.until(lambda: browser.all("#decision-list summary"), "a decision")
    browser.click("#decision-list summary")
    first = browser.run("return document.querySelector('#decision-list details').dataset.id")
    sent(system, "not read yet")
    browser.until(lambda: browser.texts("#held") == ["Show 1 new decision"], "it is announced")
    assert (
        browser.run("return document.querySelector('#decision-list details').dataset.id") == first
    )
    browser.click("#held")
    assert (
        browser.run("return document.querySelector('#decision-list details').dataset.id") != first
    )


def test_prefixes_are_shown_with_their_holders(
    browser: Browser, system: Background[System]
) -> None:
    workers = {sent(system, "shared prefix") for _ in range(2)}
    for worker in workers:
        system.do(system.it.learned(chat(long_text("shared prefix")), worker))
    opened(browser, system)
    browser.unfold("prefixes")

    def held() -> bool:
        return any(worker in text for worker in workers for text in browser.texts(".holders"))

    browser.until(held, "a holder")
    assert "shared prefix" not in browser.one("#prefix-rows").text


def test_page_shows_by_api_how_many_requests_have_known_tokens(
    browser: Browser, system: Background[System]
) -> None:
    sent(system, "known")
    asked = system.it.session.post(f"{system.it.envoy}/v1/responses", json={"model": "tiny"})
    system.do(_ended(asked))
    opened(browser, system)

    def shown() -> list[str]:
        return browser.texts("#apis li")

    browser.until(lambda: len(shown()) == 2, "both APIs")
    chat, responses = shown()
    assert chat.startswith("chat: the tokens of 100 % of ")
    assert responses == (
        "responses: the tokens of 0 % of 1 request are known; of the others most (1) are "
        "bad request."
    )


def test_page_shows_what_live_conversations_need_of_the_caches(
    browser: Browser, system: Background[System]
) -> None:
    sent(system, "live")
    opened(browser, system)
    browser.until(lambda: any(browser.texts("#contexts")), "what lives")
    (said,) = browser.texts("#contexts")
    assert re.match(r"live contexts fill \d+% of the caches", said)


def test_page_shows_with_how_many_media_items_prompts_are_keyed(browser: Browser) -> None:
    seeing = running(workers=1, changes=SEEING, model_dir=SEEING_MODEL)
    with in_background(seeing) as system, browser.visiting():
        system.do(Conversation(0).go_on(system.it))
        opened(browser, system)
        browser.until(lambda: bool(browser.texts("#media li")), "a kind of media")
        assert browser.texts("#media li") == ["image: prompts are keyed with 0 % of 1 item."]


async def _ended(asked: Any) -> None:
    async with asked as answer:
        await answer.read()


def test_pasted_request_is_explained(browser: Browser, system: Background[System]) -> None:
    opened(browser, system)
    browser.unfold("explain")
    body = json.dumps(chat(long_text("pasted")))
    browser.run("document.getElementById('explain-body').value = arguments[0]", body)
    browser.click("#explain-form .primary")
    browser.until(lambda: browser.texts("#explain-answer .verdict"), "the explanation")
    assert browser.texts("#explain-answer .verdict")[0].startswith("It would go to 127.0.0.1:")
    assert focused(browser) == "explain-answer"


def test_decision_list_shows_ten_and_more_on_request(
    browser: Browser, system: Background[System]
) -> None:
    for number in range(11):
        sent(system, f"many {number}")
    opened(browser, system)
    browser.until(lambda: len(browser.all("#decision-list li")) == 10, "ten of them")
    browser.until(lambda: browser.one("#more").is_displayed(), "more are kept")
    browser.click("#more")
    browser.until(lambda: len(browser.all("#decision-list li")) > 10, "more of them")


def test_gain_figures_compare_saved_tokens_with_round_robin(
    browser: Browser, system: Background[System]
) -> None:
    worker = sent(system, "saved")
    system.do(system.it.learned(chat(long_text("saved")), worker))
    assert sent(system, "saved") == worker
    opened(browser, system)

    def is_saved() -> bool:
        tokens, _, noun = browser.texts("#gain-saved")[0].partition(" ")
        return noun == "tokens" and int(tokens.replace(",", "")) > 0

    browser.until(is_saved, "tokens are saved")
    assert browser.texts("#gain-certain")[0].endswith(" %")
    assert "Round robin would have found" in browser.texts("#gain-words")[0]


def test_page_names_its_version_and_documentation(
    browser: Browser, system: Background[System]
) -> None:
    opened(browser, system)
    text_shown = f"KVSteer {version('kvsteer')} · documentation"
    browser.until(lambda: browser.texts("#about")[0].startswith(text_shown), "the version")
    links = [one.get_attribute("href") for one in browser.all("#about a")]
    assert f"{system.it.admin}/docs/metrics.md#reasons-of-a-decision" in links


def test_page_with_eight_workers_is_two_screens_tall(browser: Browser) -> None:
    with in_background(running(workers=8)) as eight, browser.visiting():
        for number in range(12):
            sent(eight, f"tall {number}")
        opened(browser, eight)
        browser.until(lambda: len(browser.all("#workers path")) > 0, "histories")
        browser.until(lambda: len(browser.all("#decision-list li")) == 10, "decisions")
        assert browser.run("return document.documentElement.scrollHeight") <= 2 * 900


def test_page_numbers_all_have_a_title(browser: Browser, system: Background[System]) -> None:
    for _ in range(2):
        sent(system, "titled")
    opened(browser, system)
    browser.unfold("prefixes")
    browser.until(lambda: browser.texts("#prefix-rows td"), "prefixes")
    browser.until(lambda: browser.texts("#last td"), "the candidates")
    bare = "return [...document.querySelectorAll('td, dd, .share')].filter(e => !e.title).length"
    assert browser.run(bare) == 0
    heads = "return [...document.querySelectorAll('thead th + th')].filter(e => !e.title).length"
    assert browser.run(heads) == 0


def test_page_says_how_a_cost_differs_from_the_tokens(browser: Browser) -> None:
    changes = {"policy": {"cost": {"affinity_percent": 150, "busy_affinity_percent": 0}}}
    with in_background(running(workers=1, changes=changes)) as system:
        sent(system, "weighed")
        opened(browser, system)
        browser.until(lambda: browser.texts("#last .factors"), "the factors")
        assert re.fullmatch(r"\d+ tokens . 1\.50 \(weight\)", browser.texts("#last .factors")[0])
        browser.driver.get("about:blank")


def test_times_and_counts_of_blocks_stay_on_one_line_on_a_phone(
    browser: Browser, system: Background[System]
) -> None:
    sent(system, "on a phone")
    browser.size(360, 780)
    opened(browser, system)
    browser.until(lambda: browser.all("#decision-list time"), "a decision")
    for selector in ("#decision-list time", "#workers .unbroken"):
        one = f"document.querySelector('{selector}')"
        assert browser.run(f"return {one}.getBoundingClientRect().height") < 30, selector


def test_explain_form_names_malformed_json(browser: Browser, system: Background[System]) -> None:
    opened(browser, system)
    browser.unfold("explain")
    browser.one("#explain-body").send_keys("{nothing")
    browser.click("#explain-form .primary")
    browser.until(lambda: "This is not JSON" in browser.texts("#explain-fault")[0], "the fault")
    assert focused(browser) == "explain-body"


def test_page_can_be_used_by_keyboard(browser: Browser, system: Background[System]) -> None:
    sent(system, "keyboard")
    opened(browser, system)
    browser.until(lambda: browser.all("#decision-list summary"), "a decision")
    press(browser, Keys.TAB)
    assert browser.run("return document.activeElement.className") == "skip"
    press(browser, Keys.ENTER)
    browser.until(lambda: focused(browser) == "main", "the link skips to the content")
    press(browser, *[Keys.TAB] * 4)
    assert focused(browser) == "SUMMARY"
    outline = browser.run("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"
    press(browser, Keys.ENTER)
    browser.until(lambda: browser.all("details[open] tbody tr"), "it opens")
    browser.run("document.querySelector('#explain summary').focus()")
    press(browser, Keys.ENTER)
    browser.until(lambda: browser.all("#explain > details[open]"), "the form is open")
    press(browser, *[Keys.TAB] * 4, Keys.ENTER)
    browser.until(lambda: browser.one("#explain-body").get_attribute("value"), "the example")
    ActionChains(browser.driver).key_down(Keys.SHIFT).send_keys(Keys.TAB).key_up(
        Keys.SHIFT
    ).send_keys(Keys.ENTER).perform()
    browser.until(lambda: browser.texts("#explain-answer .verdict"), "the explanation")


@pytest.mark.parametrize("width", [320, 360, 500, 740, 1000])
def test_page_is_no_wider_than_the_screen(
    browser: Browser, system: Background[System], width: int
) -> None:
    sent(system, "narrow")
    browser.size(width, 800)
    opened(browser, system)
    browser.until(lambda: browser.all("#last tbody tr"), "the last request")
    browser.until(lambda: browser.all("#prefix-rows tr"), "prefixes")
    browser.unfold("prefixes")
    browser.unfold("explain")
    browser.click("#decision-list summary")
    browser.until(lambda: browser.all("#decisions details[open] tbody tr"), "it opens")
    assert browser.run("return document.documentElement.scrollWidth") <= width


SPEED = """
const small = document.createElement("small");
small.className = "unbroken";
small.append("141,234 prompt tokens/s");
document.querySelector("#workers .number").append(small);
return document.documentElement.scrollWidth;
"""


def test_learned_speed_is_no_wider_than_the_screen(
    browser: Browser, system: Background[System]
) -> None:
    browser.size(320, 800)
    opened(browser, system)
    browser.until(lambda: browser.all("#workers tr"), "workers")
    assert browser.run(SPEED) <= 320


CONTRAST = """
const light = (c) => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
const of = (rgb) => 0.2126 * light(rgb[0]) + 0.7152 * light(rgb[1]) + 0.0722 * light(rgb[2]);
const parse = (text) => text.match(/[\\d.]+/g).map(Number);
const ground = (e) => {
  const c = parse(getComputedStyle(e).backgroundColor);
  return c.length < 4 || c[3] > 0 ? c : ground(e.parentElement);
};
return [...document.querySelectorAll("body *")]
  .filter((e) => e.checkVisibility())
  .filter((e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim()))
  .map((e) => {
    const [a, b] = [of(parse(getComputedStyle(e).color)), of(ground(e))].sort((x, y) => y - x);
    return [(a + 0.05) / (b + 0.05), `${e.tagName}.${e.className}: ${e.textContent.slice(0, 30)}`];
  })
  .filter(([ratio]) => ratio < 4.5).map(([ratio, what]) => `${ratio.toFixed(2)} ${what}`);
"""


@pytest.mark.parametrize(("scheme", "is_dark"), [("light", False), ("dark", True)])
def test_page_is_readable_in_both_colour_schemes(
    browser: Browser, system: Background[System], scheme: str, *, is_dark: bool
) -> None:
    browser.prefer(prefers_color_scheme=scheme, prefers_reduced_motion="reduce")
    opened(browser, system)
    browser.until(lambda: browser.all("#last tbody tr"), "the last request")
    ground = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (int(ground.split("(")[1].split(",")[0]) < 128) is is_dark
    states = ["live", "replaying", "degraded", "stale", "connecting", "unsupported"]
    browser.run(
        "for (const state of arguments[0]) { const one = document.createElement('p');"
        "one.className = 'pill'; one.dataset.state = state; one.textContent = state;"
        "document.getElementById('fleet').append(one); }",
        states,
    )
    assert browser.run(CONTRAST) == []  # WCAG 2.2, 1.4.3: 4.5 to 1


def test_page_omits_motion_on_request(browser: Browser, system: Background[System]) -> None:
    browser.prefer(prefers_reduced_motion="reduce")
    opened(browser, system)
    moving = "return getComputedStyle(document.querySelector('.bar i, .bar')).transitionDuration"
    assert browser.run(moving) == "0s"


def test_page_controls_all_have_a_name(browser: Browser, system: Background[System]) -> None:
    sent(system, "named")
    opened(browser, system)
    browser.until(lambda: browser.all("#decision-list summary"), "a decision")
    tree = browser.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    known = [
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in tree
        if not node["ignored"]
    ]
    roles = {role for role, _ in known}
    assert {"banner", "main", "navigation", "contentinfo", "columnheader", "rowheader"} <= roles
    used = {"button", "link", "textbox", "combobox", "DisclosureTriangle", "table", "region"}
    assert [role for role, name in known if role in used and not name.strip()] == []
    assert next(name for role, name in known if role == "heading") == "KVSteer"


def test_events_switch_is_shown(browser: Browser, system: Background[System]) -> None:
    opened(browser, system)

    async def switch(*, enabled: bool) -> None:
        url, body = f"{system.it.admin}/events", {"enabled": enabled}
        async with system.it.session.post(url, json=body) as response:
            assert response.status == 200

    system.do(switch(enabled=False))
    try:
        browser.until(lambda: browser.texts("#events") == ["KV events: off"], "events are off")
        assert browser.one("#events-off").is_displayed()
    finally:
        system.do(switch(enabled=True))
    browser.until(lambda: browser.texts("#workers .pill") == ["live"] * 3, "feeds are live again")
