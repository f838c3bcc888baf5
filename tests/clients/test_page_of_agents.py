"""docs/coding-agents.md tells users what the clients are started with here."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from extproc.config.reader import parse
from kvtools.simulator.settings import TINY_MODEL
from tests.clients.starts import MODEL, STARTS

PAGE = (Path(__file__).parents[2] / "docs/coding-agents.md").read_text()
URL = "http://ENVOY:10000"

# What only the tests set: they have no terminal, and no network.
OURS = {"HTTPS_PROXY", "NO_PROXY", "IS_SANDBOX", "MY_TOKEN"}


def blocks(kind: str) -> list[str]:
    """The page's blocks of code of a kind."""
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("client", ["claude-code", "qwen-code"])
def test_page_exports_the_variables_that_clients_are_started_with(client: str) -> None:
    start = STARTS[client](URL)
    for name, value in start.variables.items():
        if name not in OURS:
            assert f" {name}={value.replace(MODEL, 'my-model')}" in PAGE, name


@pytest.mark.parametrize(("client", "kind"), [("codex", "toml"), ("opencode", "json")])
def test_page_has_the_files_that_clients_are_started_with(client: str, kind: str) -> None:
    ((path, text),) = STARTS[client](URL).files.items()
    read = {"toml": tomllib.loads, "json": json.loads}[kind]
    (shown,) = blocks(kind)
    assert read(shown) == read(text.replace(MODEL, "my-model"))
    assert f"`~/{path}`" in PAGE


def test_configuration_of_the_page_is_valid() -> None:
    (shown,) = blocks("yaml")
    tree = yaml.safe_load(shown)
    tree["models"][0]["tokenizer"] = str(TINY_MODEL)  # the page names one of the reader's
    config = parse(yaml.safe_dump(tree), "page")
    assert config.accounting.responses == "usage"
