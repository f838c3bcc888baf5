import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.admin.documents import anchor_of, as_page

DOCS = Path(__file__).parents[3] / "docs"


def body(text: str) -> str:
    """What is shown of a page of Markdown."""
    found = re.search(r'<main class="document">(.*)</main>', as_page(text), re.DOTALL)
    assert found
    return found[1]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("# A `b` c", '<h1 id="a-b-c">A `b` c</h1>'),
        ("[a](b.md#c)", '<a href="b.md#c" rel="noreferrer">a</a>'),
        ("see [a](#c).", 'see <a href="#c" rel="noreferrer">a</a>.'),
        ("[a](https://b/)", '<a href="https://b/" rel="noreferrer">a</a>'),
        ("[a](javascript:b) [c](../README.md)", "a c"),
        ("a < b", "a &lt; b"),
        ("```\n# [a](b.md)\n```\n# c", '```\n# [a](b.md)\n```\n<h1 id="c">c</h1>'),
    ],
)
def test_page_has_headings_and_links_and_no_other_markup(text: str, shown: str) -> None:
    assert body(text) == shown


@given(st.text())
def test_page_of_any_text_has_no_tags_but_its_own(text: str) -> None:
    tags = re.findall(r"<(/?\w+)", body(text))
    assert set(tags) <= {
        "a",
        "/a",
        *(f"{end}h{level}" for end in ("", "/") for level in range(1, 7)),
    }


def test_title_is_the_first_heading() -> None:
    assert "<title>A &lt;b&gt;</title>" in as_page("x\n# A <b>\n# c")
    assert "<title></title>" in as_page("")


def test_links_between_pages_lead_to_headings() -> None:
    for page in DOCS.glob("*.md"):
        for target, anchor in re.findall(
            r'href="([\w-]+\.md)?#([\w-]+)"', as_page(page.read_text())
        ):
            there = as_page((DOCS / (target or page.name)).read_text())
            assert f'id="{anchor}"' in there, f"{page.name}: {target}#{anchor}"
    assert anchor_of("What, is `it`?") == "what-is-it"
