"""The weight of a value: about its characters as a text, and a bound for each part."""

from types import MappingProxyType
from typing import Any

import pytest
from jinja2.utils import Namespace

from extproc.base.errors import RequestError
from extproc.templates.bounds import weight

ITEM = 128
SAME: list[Any] = ["ab"]
for _ in range(40):
    SAME = [SAME, SAME]


@pytest.mark.parametrize(
    ("value", "characters", "items"),
    [
        ("abc", 3, 0),
        (b"abc", 3, 0),
        (None, 0, 0),
        (True, 0, 0),
        (7, 0, 0),
        (0.5, 0, 0),
        (object(), 0, 0),
        (["ab", 1, None], 2, 3),
        ({"key": "value", 2: ["a"]}, 9, 3),
        (("ab", {"c"}, frozenset("d")), 4, 5),
        (MappingProxyType({"key": ("a",)}), 4, 2),
    ],
)
def test_weight_is_of_characters_and_items(value: object, characters: int, items: int) -> None:
    assert weight(value) == characters + items * ITEM


@pytest.mark.parametrize(
    ("value", "most"),
    [
        ("abc", 2),
        (["a"], ITEM - 1),
        (["a"], ITEM),
        ({"a": "b"}, ITEM - 1),
        (("a",), ITEM - 1),
        (MappingProxyType({"a": "b"}), ITEM - 1),
        (SAME, 1 << 20),
        ([Namespace()], 1 << 20),
    ],
)
def test_too_heavy_value_ends_the_rendering(value: object, most: int) -> None:
    with pytest.raises(RequestError):
        weight(value, most)
