import json
from typing import Any

import pytest

from extproc.config.schema import Model
from extproc.fleet.identity.learning import block_size_in, from_models
from extproc.fleet.records.worker import SelfReport

MODELS = (Model("a", aliases=("org/a",)), Model("b"))
NONSENSE = [b"", b"[]", b"1", b"[" * 5000, b"\xff"]
NONSENSE += [b'{"data": 1}', b'{"data": [{}]}', b'{"data": [{"id": "\xff"}]}']


def told(*cards: dict[str, Any]) -> SelfReport:
    return from_models(json.dumps({"object": "list", "data": cards}).encode(), MODELS)


def test_from_models_reads_the_model_and_its_adapters() -> None:
    cards = ({"id": "b", "parent": None}, {"id": "x", "parent": "b"}, {"id": "y", "parent": "b"})
    assert told(*cards) == SelfReport("b", frozenset({"x", "y"}))


def test_from_models_matches_a_model_by_alias_or_path() -> None:
    assert told({"id": "org/a"}).model == "a"
    assert told({"id": "served", "root": "org/a"}).model == "a"


def test_from_models_ignores_an_unconfigured_model() -> None:
    assert told({"id": "c"}) == SelfReport(None, frozenset())


@pytest.mark.parametrize("answer", NONSENSE)
def test_from_models_ignores_malformed_answers(answer: bytes) -> None:
    assert from_models(answer, MODELS) == SelfReport()
    assert block_size_in(answer) is None


def test_block_size_in_prefers_events_to_pages() -> None:
    assert block_size_in(b'{"page_size": 64, "kv_events": {"block_size": 32}}') == 32
    assert block_size_in(b'{"page_size": 64, "kv_events": null}') == 64
    assert block_size_in(b'{"page_size": 64, "kv_events": {}}') == 64


@pytest.mark.parametrize("size", [0, -1, 1 << 30])
def test_block_size_in_ignores_impossible_sizes(size: int) -> None:
    assert block_size_in(json.dumps({"page_size": size}).encode()) is None
