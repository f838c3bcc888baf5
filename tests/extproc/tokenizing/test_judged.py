"""Requests as vLLM 0.32 itself tokenizes them for models without tokenizer.json."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from extproc.base.errors import RequestError
from extproc.config.schema import Model
from extproc.requests.dialect import NEWEST
from extproc.requests.prompt import CONVERSATION, IN_CODE, REBUILT
from extproc.requests.request import parse
from extproc.tokenizing.tokens import Tokenizer
from tests.extproc.small_models import JUDGED, write_model

MODELS = list(JUDGED["ids"])


@functools.cache
def tokenizer_of(name: str, directory: Path) -> Tokenizer:
    found = Tokenizer.load(Model("m", tokenizer=str(write_model(name, directory))))
    assert found is not None
    return found


@pytest.fixture(scope="module", params=MODELS)
def judged(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, list[Any]]:
    directory = tmp_path_factory.mktemp(request.param)
    return tokenizer_of(request.param, directory), JUDGED["ids"][request.param]


def ids_of(tokenizer: Tokenizer, request: dict[str, Any]) -> list[list[int]] | None:
    body = json.dumps(request["body"]).encode()
    try:
        prompts = parse(request["path"], body, lambda _: NEWEST).prompts
        return [tokenizer.encode(prompt).tolist() for prompt in prompts]
    except RequestError:
        return None


def test_ids_are_the_engines_wherever_it_accepts_a_request(
    judged: tuple[Tokenizer, list[Any]],
) -> None:
    tokenizer, ids = judged
    asked = [(one, is_) for one, is_ in zip(JUDGED["requests"], ids, strict=True) if is_]
    assert len(asked) >= 10
    assert [ids_of(tokenizer, one) for one, _ in asked] == [is_ for _, is_ in asked]


@pytest.mark.parametrize(("name", "form"), [("mistral-v13", IN_CODE), ("kimi-k2", REBUILT)])
def test_what_is_converted_needs_a_proof(name: str, form: int, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(name, tmp_path)
    body = json.dumps(JUDGED["requests"][0]["body"]).encode()
    (chat,) = parse("/v1/chat/completions", body, lambda _: NEWEST).prompts
    assert tokenizer.start(chat).forms & form
    assert not form & CONVERSATION
