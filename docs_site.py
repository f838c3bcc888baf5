"""Adds files from outside docs/ to the site: the changelog, and files that pages link to.

mkdocs runs this during the build (mkdocs.yml), so that the same links work in the repository, where
they may lead out of docs/, and on the site, where they cannot.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent

# Pages in the repository's root, and their names on the site.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "README.md": "index.md",
}

# Links from a page in docs/ to the repository, and from a page in the root into docs/.
_OUTWARD = re.compile(r"\]\(\.\./([^)#\s]+)")
_INWARD = re.compile(r"\]\((docs/)?([^)#:\s]+)(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the root's pages, and each file that a page of docs/ links to; returns all files."""
    linked = {
        target
        for page in Path(config.docs_dir).glob("*.md")
        for target in _OUTWARD.findall(page.read_text())
        if target not in PAGES
    }
    names = {name: to for name, to in PAGES.items() if to != "index.md"}
    names |= {target: _copied(target) for target in linked}
    for source, name in names.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - mkdocs calls it by these names
    """Returns the page with its links pointing to the files' names on the site."""
    if page.file.src_uri in PAGES.values() and page.file.src_uri != "index.md":
        return _INWARD.sub(lambda found: f"]({_on_site(found)}", markdown)
    return _OUTWARD.sub(lambda found: f"]({PAGES.get(found[1]) or _copied(found[1])}", markdown)


def _on_site(found: re.Match[str]) -> str:
    return found[2] if found[1] else PAGES.get(found[2], _copied(found[2]))


def _copied(target: str) -> str:
    """Returns the name on the site of a file's copy, which is not a page."""
    return f"repository/{target.replace('.github', 'github')}"
