"""The measures that the architecture has to meet, and the page that shows it."""

import pytest

from tests.house import measures, tree
from tests.ways import PAGE, Traced, calls_on, ways, written

DRAW = "python -m tests.ways"


def test_a_module_is_as_long_as_its_idea() -> None:
    found = measures()
    assert found.largest[1] <= 600, found.largest
    assert 150 <= found.median_lines <= 290
    assert found.modules <= 154


def test_no_package_imports_in_circles_and_few_layers_lie_on_each_other() -> None:
    found = measures()
    assert not found.cycles
    assert found.depth <= 14


def test_few_modules_have_a_single_user() -> None:
    found = measures()
    assert found.share(found.single) <= 26, sorted(found.single)
    assert found.share(found.single_but_commands) < 20, sorted(found.single_but_commands)


def test_the_page_shows_the_tree_as_it_is() -> None:
    page = PAGE.read_text()
    assert written(page, {"The tree": tree()}) == page, f"draw it anew: {DRAW}"


@pytest.fixture(scope="module")
def traced() -> dict[str, Traced]:
    return ways()


def test_the_page_shows_the_ways_as_they_are(traced: dict[str, Traced]) -> None:
    for title, way in traced.items():
        shown = calls_on(PAGE.read_text(), title)
        assert way.calls <= shown, f"draw it anew: {DRAW}"
        assert shown <= way.ever, f"draw it anew: {DRAW}"


def test_a_request_and_an_event_go_through_few_modules(traced: dict[str, Traced]) -> None:
    assert len(traced["The way of a request"].modules) <= 40
    assert len(traced["The way of an event"].modules) <= 7
