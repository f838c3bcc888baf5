"""Every reason for which a request is not keyed is documented, and no other."""

import re
from pathlib import Path

from extproc.requests.grpc_request import PATHS
from extproc.requests.request import _PARSERS

ROOT = Path(__file__).resolve().parent.parent.parent


# Modules that read requests and render templates; tokenizers have their own reasons.
MODULES = re.compile(r"(\w*request\w*|chat_\w+|template_\w+|content_\w+|contin\w+|message_\w+)\.py")


def raised(in_modules: re.Pattern[str]) -> set[str]:
    files = sorted((ROOT / "extproc").rglob("*.py"))
    sources = [path.read_text() for path in files if in_modules.fullmatch(path.name)]
    return set(re.findall(r'RequestError\(\s*"(\w+)"', "".join(sources)))


def test_every_reason_is_documented_and_no_other() -> None:
    page = (ROOT / "docs" / "requests.md").read_text()
    (section,) = re.findall(r"## What is not keyed\n(.*?)\n## ", page, re.DOTALL)
    first_cells = re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE)
    documented = set(re.findall(r"`(\w+)`", " ".join(first_cells)))
    assert raised(MODULES) <= documented <= raised(re.compile(".*"))


def test_every_path_is_documented() -> None:
    page = (ROOT / "docs" / "requests.md").read_text()
    assert all(f"| `{path}` |" in page for path in _PARSERS)
    assert all(path.split("/")[1] in page for path in PATHS)
