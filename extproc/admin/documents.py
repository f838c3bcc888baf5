"""Pages of the documentation, as far as its files are beside the package, as they are in a clone.

A page is shown as it is written in Markdown, with its headings as targets and its links as links.
"""

import re
from collections.abc import Collection
from html import escape
from posixpath import dirname, join, normpath

# The folder of all pages, where the server has them.
PATH = "/docs"

# As GitHub names the anchors of headings.
_NOT_IN_ANCHORS = re.compile(r"[^\w\- ]")
_HEADING = re.compile(r"(#{1,6}) +(.*)")
_LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")


def anchor_of(heading: str) -> str:
    """Returns the name by which links lead to a heading."""
    return _NOT_IN_ANCHORS.sub("", heading.lower()).replace(" ", "-")


def as_page(text: str, name: str, pages: Collection[str]) -> str:
    """Returns a page of Markdown as HTML; whatever it has, no other markup comes out.

    name: of the page, as in `pages`, the names of all below the documentation's folder. Links
    elsewhere on this server are left out.
    """
    lines, is_code = [], False
    for line in text.splitlines():
        is_code ^= line.lstrip().startswith("```")
        lines.append(escape(line) if is_code else _shown(line, name, pages))
    title = next((line.lstrip("# ") for line in text.splitlines() if line.startswith("# ")), "")
    shown = "\n".join(lines)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel="stylesheet" href="/page/page.css"></head>'
        f'<body><main class="document">{shown}</main></body></html>'
    )


def _shown(line: str, page: str, pages: Collection[str]) -> str:
    heading = _HEADING.fullmatch(line)
    if heading is None:
        return _with_links(line, page, pages)
    level, words = len(heading[1]), heading[2]
    anchor = escape(anchor_of(_LINK.sub(r"\1", words)))
    return f'<h{level} id="{anchor}">{_with_links(words, page, pages)}</h{level}>'


def _with_links(line: str, page: str, pages: Collection[str]) -> str:
    shown, at = "", 0
    for link in _LINK.finditer(line):
        shown += escape(line[at : link.start()])
        words, target = escape(link[1]), link[2]
        to = target.partition("#")[0]
        is_ours = not to or normpath(join(dirname(page), to)) in pages
        if is_ours or target.startswith("https://"):
            shown += f'<a href="{escape(target)}" rel="noreferrer">{words}</a>'
        else:
            shown += words
        at = link.end()
    return shown + escape(line[at:])
