"""Adds files from outside docs/ to the site: the changelog, and files that pages link to.

mkdocs runs this during the build (mkdocs.yml), so that the same links work in the repository, where
they may lead out of docs/, and on the site, where they cannot.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent

# Pages outside of docs/, and their names on the site.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
    "SECURITY.md": "reporting.md",
    "README.md": "index.md",
    "benchmarks/results.md": "internals/results.md",
}

# The target of a link within the repository, without its anchor.
_LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]+)(?=[)#])")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages outside of docs/, and each file that a page links to; returns all files."""
    docs = Path(config.docs_dir)
    sources = [page.relative_to(ROOT).as_posix() for page in docs.rglob("*.md")]
    sources += [name for name, to in PAGES.items() if to != "index.md"]
    linked = {
        _in_repository(target, source)
        for source in sources
        for target in _LINK.findall((ROOT / source).read_text())
    }
    linked |= set(PAGES)
    outside = {one for one in linked if not one.startswith("docs/")} - {"README.md"}
    outside = {one for one in outside if (ROOT / one).is_file()}
    for path in sorted(outside):
        files.append(File.generated(config, _on_site(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - mkdocs calls it by these names
    """Returns the page with its links pointing to the files' names on the site."""
    here = page.file.src_uri
    outside = {to: name for name, to in PAGES.items() if to != "index.md"}
    source = outside.get(here, f"docs/{here}")
    return _LINK.sub(
        lambda found: f"]({_relative(_on_site(_in_repository(found[1], source)), here)}", markdown
    )


def _in_repository(target: str, source: str) -> str:
    """Returns the path in the repository of what a file there links to."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def _on_site(path: str) -> str:
    """Returns the name on the site of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return PAGES.get(path) or f"repository/{path.replace('.github', 'github')}"


def _relative(name: str, here: str) -> str:
    return posixpath.relpath(name, posixpath.dirname(here) or ".")
