"""Requests that an engine's server answers are found by their paths, however they are spelled.

served_paths.json is what a real uvicorn with Starlette answered; served_paths.py produces it.
"""

import json
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.requests.request import (
    MAX_LEARNED,
    NOT_INFERENCE,
    UNKEYED,
    LearnedPaths,
    may_compute,
    path_of,
    why_unkeyed,
)
from tests.extproc.requests.served_paths import PATH, TARGETS

SERVED = json.loads(Path(__file__).with_name("served_paths.json").read_text())
NOT_FOUND = 404


def test_target_table_is_complete() -> None:
    assert list(SERVED) == list(TARGETS)


@pytest.mark.parametrize("target", TARGETS)
def test_target_is_inference_exactly_if_a_real_server_answers_it(target: str) -> None:
    statuses = SERVED[target].values()
    if 200 in statuses:
        assert path_of(target) == PATH
    elif set(statuses) == {NOT_FOUND}:
        assert why_unkeyed("POST", path_of(target)) == "not_inference"


@given(st.lists(st.sampled_from(["plain", "lower", "upper"]), min_size=len(PATH)), st.text())
def test_path_of_decodes_any_encoding_of_letters(ways: list[str], query: str) -> None:
    written = {"plain": "{}", "lower": "%{:02x}", "upper": "%{:02X}"}
    letters = [
        letter if way == "plain" else written[way].format(ord(letter))
        for letter, way in zip(PATH[1:], ways, strict=False)
    ]
    assert path_of("/" + "".join(letters) + "?" + quote(query)) == PATH


def test_path_of_decodes_once() -> None:
    assert path_of("/v1/chat/%2563ompletions") == "/v1/chat/%63ompletions"


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions/batch", "/generative_scoring", "/v1/systemone", "/v2/embed"],
)
def test_vllm_paths_of_other_apis_call_a_model(path: str) -> None:
    assert why_unkeyed("POST", path) == UNKEYED


def test_sglang_generate_accepts_put() -> None:
    assert why_unkeyed("PUT", "/generate") == ""
    assert why_unkeyed("PUT", "/encode") == UNKEYED
    assert why_unkeyed("PUT", "/v1/completions") == "not_inference"


@given(st.lists(st.integers(0, 2 * MAX_LEARNED)))
def test_learned_paths_keep_the_latest(numbers: list[int]) -> None:
    learned = LearnedPaths()
    for number in numbers:
        learned.learn(f"/{number}")
    latest = list(dict.fromkeys(reversed(numbers)))[:MAX_LEARNED]
    known = {
        n for n in range(2 * MAX_LEARNED + 1) if learned.why_unkeyed("POST", f"/{n}") == UNKEYED
    }
    assert known == set(latest)


def test_learned_paths_evict_the_oldest() -> None:
    learned = LearnedPaths()
    for number in range(MAX_LEARNED + 1):
        learned.learn(f"/{number}")
    assert learned.why_unkeyed("POST", "/0") == NOT_INFERENCE
    assert learned.why_unkeyed("POST", f"/{MAX_LEARNED}") == UNKEYED


@pytest.mark.parametrize(
    ("method", "path", "may"),
    [
        ("", "", True),
        ("POST", "/v1/unheard-of", True),
        ("GET", "/v1/unheard-of", False),
        ("POST", "/tokenize", False),
    ],
)
def test_prompt_may_be_computed_for_what_is_posted(method: str, path: str, *, may: bool) -> None:
    assert may_compute(method, path) is may
