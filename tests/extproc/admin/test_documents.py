import re
from pathlib import Path
from posixpath import dirname, join, normpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.admin.documents import anchor_of, as_page

DOCS = Path(__file__).parents[3] / "docs"


def body(text: str) -> str:
    """What is shown of a page of Markdown."""
    shown = as_page(text, "c/a.md", ("b.md", "c/a.md", "c/b.md"))
    found = re.search(r'<main class="document">(.*)</main>', shown, re.DOTALL)
    assert found
    return found[1]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("# A `b` c", '<h1 id="a-b-c">A `b` c</h1>'),
        ("[a](b.md#c)", '<a href="b.md#c" rel="noreferrer">a</a>'),
        ("see [a](#c).", 'see <a href="#c" rel="noreferrer">a</a>.'),
        ("[a](https://b/)", '<a href="https://b/" rel="noreferrer">a</a>'),
        ("[a](../b.md)", '<a href="../b.md" rel="noreferrer">a</a>'),
        ("[a](javascript:b) [c](../../README.md) [d](d.md)", "a c d"),
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
    assert "<title>A &lt;b&gt;</title>" in as_page("x\n# A <b>\n# c", "a.md", ())
    assert "<title></title>" in as_page("", "a.md", ())


def test_links_between_pages_lead_to_headings() -> None:
    paths = {path.relative_to(DOCS).as_posix(): path for path in DOCS.rglob("*.md")}
    shown = {name: as_page(path.read_text(), name, paths) for name, path in paths.items()}
    for name, page in shown.items():
        for target, anchor in re.findall(r'href="([\w./-]+\.md)?#([\w-]+)"', page):
            there = normpath(join(dirname(name), target)) if target else name
            assert f'id="{anchor}"' in shown[there], f"{name}: {target}#{anchor}"
    assert anchor_of("What, is `it`?") == "what-is-it"
