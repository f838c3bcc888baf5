"""A headless Chromium for the duration of a test run, and queries of its page."""

import base64
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from selenium.common.exceptions import (
    ElementClickInterceptedException,
    StaleElementReferenceException,
)
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
MISSING = "Debian's packages chromium and chromium-driver are not installed"
WAIT_SECONDS = 60

_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
)


class Browser:
    """One page at a time."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver
        self._heard: list[str] = []

    def open(self, url: str) -> None:
        """Goes to a page, and waits until it has shown the workers once."""
        self.driver.get(url)

        def shown() -> bool:
            if self._is_network_changed():
                self.driver.get(url)
            return bool(self.texts("#workers th"))

        self.until(shown, "workers are shown")

    @contextlib.contextmanager
    def visiting(self) -> Iterator[None]:
        """Leaves the page when the block ends, so that it asks nothing of a server that ends."""
        try:
            yield
        finally:
            self.driver.get("about:blank")

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Awaits a state of the page; the failure names it."""

        def holds(_: object) -> bool:
            # it may be redrawn meanwhile, or not drawn yet
            with contextlib.suppress(StaleElementReferenceException, IndexError):
                return bool(condition())
            return False

        WebDriverWait(self.driver, WAIT_SECONDS, 0.05).until(holds, what)

    def all(self, selector: str) -> list[WebElement]:
        """Elements by a CSS selector."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def one(self, selector: str) -> WebElement:
        """The first element of a CSS selector."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def click(self, selector: str) -> None:
        """Clicks a selector's first element, scrolled to at once: a smooth scroll would move it."""
        at_once = "arguments[0].scrollIntoView({block: 'center', behavior: 'instant'})"

        def clicked() -> bool:
            self.run(at_once, self.one(selector))
            try:
                self.one(selector).click()
            except ElementClickInterceptedException:  # something above it grew
                return False
            return True

        self.until(clicked, f"a click on {selector}")

    def unfold(self, section: str) -> None:
        """Opens a section that is folded, as its link does."""
        self.click(f'nav a[href="#{section}"]')
        self.until(lambda: self.all(f"#{section} > details[open]"), f"{section} is open")

    def texts(self, selector: str) -> list[str]:
        """The texts of a selector's elements, read at one moment."""
        text: list[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)",
            selector,
        )
        return text

    def run(self, script: str, *arguments: object) -> Any:
        """Runs a script in the page."""
        return self.driver.execute_script(script, *arguments)

    def size(self, width: int, height: int) -> None:
        """Lays the page out as on a screen of this size, in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, **features: str) -> None:
        """Sets media features, such as `prefers_color_scheme="dark"`."""
        asked = [{"name": name.replace("_", "-"), "value": one} for name, one in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": asked})

    def complaints(self) -> list[str]:
        """What was written to the console since the last call."""
        self._is_network_changed()
        heard, self._heard = self._heard, []
        return heard

    def _is_network_changed(self) -> bool:
        """Whether the browser gave up requests because a network interface came or went.

        Containers that start cause that; it is no fault of the page, which asks again.
        """
        log: list[dict[str, Any]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        text = [str(entry["message"]) for entry in log]
        self._heard += [one for one in text if "ERR_NETWORK_CHANGED" not in one]
        return any("ERR_NETWORK_CHANGED" in one for one in text)

    def picture(self, width: int, height: int) -> bytes:
        """A PNG of the page from its top."""
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}
        asked = {"captureBeyondViewport": True, "clip": clip}
        taken = self.driver.execute_cdp_cmd("Page.captureScreenshot", asked)
        return base64.b64decode(taken["data"])


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """Runs Chromium until the block ends; it must be installed."""
    assert CHROMIUM is not None, MISSING
    assert DRIVER is not None, MISSING
    options = ChromeOptions()
    options.binary_location = CHROMIUM
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        for flag in (*_FLAGS, f"--user-data-dir={Path(profile)}", "--window-size=1280,900"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = Chrome(options=options, service=Service(DRIVER))
        try:
            yield Browser(driver)
        finally:
            driver.quit()
