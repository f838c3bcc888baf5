"""Pages of the documentation, as far as its files are beside the package, as they are in a clone.

A page is shown as it is written in Markdown, with its headings as targets and its links as links.
"""

import re
from html import escape

# The folder of all pages, where the server has them.
PATH = "/docs"

# As GitHub names the anchors of headings.
_NOT_IN_ANCHORS = re.compile(r"[^\w\- ]")
_HEADING = re.compile(r"(#{1,6}) +(.*)")
_LINK = re.compile(r"!?\[([^\]]*)\]\(([^)\s]+)\)")
_PAGE = re.compile(r"([\w-]+\.md)?(#[\w-]+)?")


def anchor_of(heading: str) -> str:
    """Returns the name by which links lead to a heading."""
    return _NOT_IN_ANCHORS.sub("", heading.lower()).replace(" ", "-")


def as_page(text: str) -> str:
    """Returns a page of Markdown as HTML; whatever it has, no other markup comes out."""
    lines, is_code = [], False
    for line in text.splitlines():
        is_code ^= line.lstrip().startswith("```")
        lines.append(escape(line) if is_code else _shown(line))
    title = next((line.lstrip("# ") for line in text.splitlines() if line.startswith("# ")), "")
    shown = "\n".join(lines)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{escape(title)}</title><link rel="stylesheet" href="/page/page.css"></head>'
        f'<body><main class="document">{shown}</main></body></html>'
    )


def _shown(line: str) -> str:
    heading = _HEADING.fullmatch(line)
    if heading is None:
        return _with_links(line)
    level, name = len(heading[1]), heading[2]
    anchor = escape(anchor_of(_LINK.sub(r"\1", name)))
    return f'<h{level} id="{anchor}">{_with_links(name)}</h{level}>'


def _with_links(line: str) -> str:
    shown, at = "", 0
    for link in _LINK.finditer(line):
        shown += escape(line[at : link.start()])
        name, target = escape(link[1]), link[2]
        is_ours = bool(_PAGE.fullmatch(target))
        if is_ours or target.startswith("https://"):
            shown += f'<a href="{escape(target)}" rel="noreferrer">{name}</a>'
        else:
            shown += name
        at = link.end()
    return shown + escape(line[at:])
