"""The files of deploy and envoy that follow from a configuration or from the router's headers.

python -m tests.deploy.envoy_files

writes them (`make envoy-files`). Those that are rendered are the output of `kvsteer envoy`. Those
that explain each setting are written by hand: only their lists of removed headers follow.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from extproc.config.owned_headers import removed_early
from extproc.config.reader import parse
from extproc.config.schema import Config
from extproc.envoy.envoy_config import render
from tests.imports import ROOT

# By file, the configuration that it is rendered for.
RENDERED = {
    "deploy/compose/envoy.yaml": "deploy/compose/kvsteer.yaml",
    "deploy/compose/gpu/envoy.yaml": "deploy/compose/gpu/kvsteer.yaml",
    "deploy/compose/scale/envoy.yaml": "deploy/compose/scale/kvsteer.yaml",
    "deploy/kubernetes/overlays/sidecar/envoy.yaml": (
        "deploy/kubernetes/components/sidecar/kvsteer.yaml"
    ),
}
# By file written by hand, the configuration that it is an example for.
EXPLAINED = {
    "envoy/add-to-your-envoy.yaml": "deploy/kubernetes/base/kvsteer.yaml",
    "envoy/envoy.yaml": "deploy/kubernetes/base/kvsteer.yaml",
    "deploy/kubernetes/overlays/envoy-gateway/traffic.yaml": "deploy/kubernetes/base/kvsteer.yaml",
    "deploy/kubernetes/overlays/istio-envoyfilter/envoyfilter.yaml": (
        "deploy/kubernetes/base/kvsteer.yaml"
    ),
}

# One or more items that remove a header each, and a list of such headers.
_ITEMS = re.compile(r"(?:(?<=\n)( *)- remove: \S+\n)+")
_LIST = re.compile(r"(?<= remove: )\[[^]]*\]")

_TOKENIZER = re.compile(r"(?<=tokenizer: )[\w/]+")


def _configuration(source: str) -> Config:
    """Returns a configuration with a tokenizer that is here, of which no Envoy knows."""
    text = (ROOT / source).read_text()
    return parse(_TOKENIZER.sub(str(ROOT / "kvtools/simulator/tiny_model"), text), source)


def envoy_files() -> Iterator[tuple[Path, str]]:
    """Yields each file with the text that it has to have."""
    for name, source in RENDERED.items():
        yield ROOT / name, render(_configuration(source))
    for name, source in EXPLAINED.items():
        removed = removed_early(_configuration(source))
        yield ROOT / name, with_removed((ROOT / name).read_text(), removed)


def with_removed(text: str, names: tuple[str, ...]) -> str:
    """Returns a file's text with the removal of these headers in the place of its own."""

    def items(found: re.Match[str]) -> str:
        return "".join(f"{found[1]}- remove: {name}\n" for name in names)

    return _LIST.sub(f"[{', '.join(names)}]", _ITEMS.sub(items, text))


if __name__ == "__main__":
    for path, text in envoy_files():
        path.write_text(text)
