from typing import Any

import pytest

from extproc.config.schema import Config, ExtProc
from extproc.config.sections import Isolation
from kvtools.envoy.path_rewrites import unrecognized

EDITS = Config(isolation=Isolation(header="x-tenant", secret_file="s"))


def notes(match: Any, action: Any, config: Config = EDITS, prefixes: tuple[str, ...] = ()) -> str:
    named = Config(extproc=ExtProc(path_prefixes=prefixes), isolation=config.isolation)
    return unrecognized(match, action, named)


@pytest.mark.parametrize(
    ("match", "to", "prefix"),
    [
        ({"prefix": "/llm/tiny/"}, "/", "/llm/tiny"),
        ({"prefix": "/llm/tiny"}, "/", "/llm/tiny"),
        ({"path_separated_prefix": "/llm/tiny"}, "/", "/llm/tiny"),
        ({"prefix": "/llm/v1/"}, "/v1/", "/llm"),
        ({"prefix": "/openai/deployments/m/"}, "/v1/", "/openai/deployments/m"),
        ({"path": "/llm/v1/chat/completions"}, "/v1/chat/completions", "/llm"),
    ],
)
def test_prefix_to_set_is_named_where_bodies_are_edited(match: Any, to: str, prefix: str) -> None:
    action = {"prefix_rewrite": to}
    assert notes(match, action).endswith(f": set extproc.path_prefixes: [{prefix}]")
    assert notes(match, action, prefixes=(prefix,)) == ""
    responses = " changes /openai/deployments/m/responses to /v1/responses"
    assert notes(match, action, Config()) == "" or responses in notes(match, action, Config())


def test_path_that_no_setting_finds_is_told() -> None:
    said = notes({"path": "/talk"}, {"prefix_rewrite": "/v1/chat/completions"}, Config())
    assert said.startswith("prefix_rewrite changes /talk to /v1/chat/completions: no setting")


@pytest.mark.parametrize("key", ["regex_rewrite", "path_rewrite_policy"])
def test_rewrite_that_cannot_be_followed_needs_a_prefix_where_bodies_are_edited(key: str) -> None:
    action = {key: {"pattern": {"regex": "^/a/[^/]+"}, "substitution": ""}}
    assert notes({"prefix": "/a/"}, action) == (
        f"{key} changes paths: name what it takes away in extproc.path_prefixes"
    )
    assert notes({"prefix": "/a/"}, action, prefixes=("/a/b",)) == ""
    assert notes({"prefix": "/a/"}, action, Config()) == ""


@pytest.mark.parametrize(
    ("match", "action"),
    [
        ({"prefix": "/"}, {}),
        ({"prefix": "/"}, {"prefix_rewrite": ""}),
        ({"prefix": 1}, {"prefix_rewrite": "/"}),
        ({"safe_regex": {"regex": ".*"}}, {"prefix_rewrite": "/"}),
        ({"prefix": "/shop/"}, {"prefix_rewrite": "/buy/"}),
        ({"path": "/shop"}, {"prefix_rewrite": "/buy"}),
        ({"prefix": "/v1/"}, {"prefix_rewrite": "/v1/"}),
    ],
)
def test_route_that_changes_no_engines_path_is_right(match: Any, action: Any) -> None:
    assert notes(match, action) == ""
