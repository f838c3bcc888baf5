import pytest

from kvstate.overlap import Extra
from kvstate.wire.extras import Skipped, extras_of, with_root


def test_blocks_that_carry_tokens_only_have_no_extras() -> None:
    assert extras_of(None, None, None, 2, 4) is None
    assert extras_of([None, []], [[], None], None, 2, 4) is None
    assert extras_of([["a"], ["a"]], None, "a", 2, 4) is None


def test_adapter_name_is_left_out() -> None:
    assert extras_of([["a", "salt"], ["a"]], None, "a", 2, 4) == [("salt",), ()]
    assert extras_of([["a"]], None, None, 1, 4) == [("a",)]


def test_keys_may_be_scalars_or_pairs() -> None:
    assert extras_of(["salt", [["image", 3]]], None, None, 2, 4) == [("salt",), (["image", 3],)]


def image(name: object, before: int | None) -> dict[str, object]:
    return {"type": "mm_key", "hash": name, "start_offset": before}


@pytest.mark.parametrize(
    ("images", "expected"),
    [
        ([[image("a", 0)], [image("a", 3)], [image("a", 7)]], [["a", 1], ["a", -3], ["a", -7]]),
        ([[image("a", 0)], [image("a", 4)], None], [["a", 0], ["a", -4]]),
        ([[image("a", 0)], None, None], [["a"]]),
        ([[image("a", None)], [image("a", 3)], None], [["a"], ["a", -3]]),
        ([[image("a", 0)], [image("a", 9)], None], [["a"], ["a", -9]]),
        ([[image("a", 0)], [image("a", 2), image(7, 0)], [image(7, 1)]],
         [["a", 2], ["a", -2], [7, 3], [7, -1]]),
    ],
)  # fmt: skip
def test_tensorrt_items_begin_where_the_next_block_says(
    images: list[object], expected: list[object]
) -> None:
    found = extras_of([["k"], None, None], images, None, 3, 4)
    assert found is not None
    assert found[0][0] == "k"
    assert [one for extra in found for one in extra][1:] == expected


@pytest.mark.parametrize(
    "keys", [{"cache_salt": "tenant"}, [None, None], [[[["nested"]]]], [[{"a": 1}]]]
)
def test_invalid_extra_keys_are_refused(keys: object) -> None:
    with pytest.raises(Skipped, match="bad_extra_keys"):
        extras_of(keys, None, None, 1, 4)


@pytest.mark.parametrize(
    "images",
    [
        "image",
        [],
        ["image"],
        [["image"]],
        [[{}]],
        [[{"hash": {}, "start_offset": 0}]],
        [[image(["a"], 0)]],
        [[image("a", 2**70)]],
        [[image("a", True)]],
    ],
)
def test_invalid_image_keys_are_refused(images: object) -> None:
    with pytest.raises(Skipped, match="bad_mm_keys"):
        extras_of(None, images, None, 1, 4)


@pytest.mark.parametrize(
    ("extras", "first", "salt", "expected"),
    [
        (None, None, None, None),
        ([("k",), ()], None, None, [("k",), ()]),
        (None, None, "salt", [("salt",), ()]),
        (None, 7, None, [(7,), ()]),
        (None, 7, "salt", [(7, "salt"), ()]),
        ([("k",), ("l",)], 7, "salt", [(7, "salt", "k"), ("l",)]),
        ([("salt",), ()], None, "salt", [("salt",), ()]),  # it was said twice
    ],
)
def test_root_carries_first_token_and_salt(
    extras: list[Extra] | None, first: int | None, salt: str | None, expected: object
) -> None:
    assert with_root(extras, first, salt, 2) == expected


def test_invalid_salt_is_refused() -> None:
    with pytest.raises(Skipped, match="bad_cache_salt"):
        with_root(None, None, 7, 1)
