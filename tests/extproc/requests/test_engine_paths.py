import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.requests.engine_paths import EnginePaths
from extproc.requests.request import PATHS, UNKEYED_PATHS, path_of

KNOWN = sorted({*PATHS, *UNKEYED_PATHS})
PREFIXES = st.from_regex(r"(/[a-z0-9_-]{1,9}){1,3}", fullmatch=True)


@pytest.mark.parametrize(
    ("path", "seen"),
    [
        ("/llm/tiny/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/deployments/M/chat/completions", "/v1/chat/completions"),
        ("/openai/deployments/M/completions", "/v1/completions"),
        ("/openai/v1/responses", "/v1/responses"),
        ("/anthropic/v1/messages", "/v1/messages"),
        ("/x/inference/v1/generate", "/inference/v1/generate"),
    ],
)
def test_path_that_ends_like_an_engines_is_taken_for_it(path: str, seen: str) -> None:
    assert EnginePaths().seen(path) == seen


@pytest.mark.parametrize(
    "path", ["/images/generate", "/v1/threads/t1/messages", "/llm/v1/models", "/autocompletions"]
)
def test_path_that_any_service_may_have_stays(path: str) -> None:
    assert EnginePaths().seen(path) == path


@given(st.sampled_from(KNOWN))
def test_engines_own_path_stays(path: str) -> None:
    assert EnginePaths(["/llm"]).seen(path) == path


@given(PREFIXES, st.sampled_from(KNOWN))
def test_configured_prefix_is_taken_away(prefix: str, path: str) -> None:
    for written in (prefix, f"{prefix}/"):
        assert EnginePaths([written], guesses=False).seen(prefix + path) == path


@given(PREFIXES, st.sampled_from(KNOWN))
def test_nothing_is_guessed_where_bodies_are_edited(prefix: str, path: str) -> None:
    assert EnginePaths(["/other"], guesses=False).seen(prefix + path) == prefix + path


def test_longest_prefix_counts() -> None:
    paths = EnginePaths(["/llm", "/llm/tiny"], guesses=False)
    assert paths.seen("/llm/tiny/generate") == "/generate"
    assert paths.seen("/llm/tinyer/generate") == "/tinyer/generate"


def test_prefix_ends_where_a_part_of_the_path_does() -> None:
    paths = EnginePaths(["/llm"], guesses=False)
    assert paths.seen("/llms/v1/score") == "/llms/v1/score"
    assert paths.seen("/llm") == "/llm"


@pytest.mark.parametrize("rest", ["/chat/completions", "/messages", "/responses/resp_1/cancel"])
def test_path_behind_a_prefix_may_lack_the_version(rest: str) -> None:
    paths = EnginePaths(["/openai/deployments/M"], guesses=False)
    assert paths.seen(f"/openai/deployments/M{rest}") == f"/v1{rest}"


@given(st.text())
def test_any_path_is_answered(target: str) -> None:
    path = path_of(target)
    assert EnginePaths(["/a"]).seen(path) == path or path.startswith("/a/") or "completions" in path
