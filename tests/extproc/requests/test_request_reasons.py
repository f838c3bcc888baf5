"""Every reason for which a request is not keyed is documented, and no other."""

import re
from pathlib import Path

from extproc.requests import grpc_request
from extproc.requests.request import PATHS

ROOT = Path(__file__).parents[3]
# Modules that read requests and render templates; tokenizers have their own reasons.
MODULES = re.compile(r"(\w*request\w*|chat_\w+|template_\w+|content_\w+|contin\w+|message_\w+)\.py")


def raised(in_modules: re.Pattern[str]) -> set[str]:
    files = sorted((ROOT / "extproc").rglob("*.py"))
    sources = [path.read_text() for path in files if in_modules.fullmatch(path.name)]
    patterns = (
        r'RequestError\(\s*"(\w+)"|^(?:    [A-Z_]+:|[A-Z_]+ =) "(unsupported_\w+)",?$'
        r'|RefusedCut\(.*"(\w+)"\)$'
    )
    found = re.findall(patterns, "".join(sources), re.MULTILINE)
    return {"".join(each) for each in found}


def test_reasons_and_their_documentation_agree() -> None:
    page = (ROOT / "docs" / "internals" / "reasons.md").read_text()
    (section,) = re.findall(r"## What is not keyed\n(.*?)\n## ", page, re.DOTALL)
    first_cells = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    documented = set(re.findall(r"`(\w+)`", " ".join(first_cells)))
    assert raised(MODULES) <= documented <= raised(re.compile(".*"))


def test_paths_are_all_documented() -> None:
    page = (ROOT / "docs" / "requests.md").read_text()
    assert all(f"| `{path}` |" in page for path in PATHS)
    assert all(path.split("/")[1] in page for path in grpc_request.PATHS)
