import pytest

from kvstate.overlap import Extra
from kvstate.wire.extras import Skipped, extras_of, with_root


def test_blocks_that_carry_tokens_only_have_no_extras() -> None:
    assert extras_of(None, None, None, 2) is None
    assert extras_of([None, []], [[], None], None, 2) is None
    assert extras_of([["a"], ["a"]], None, "a", 2) is None


def test_adapter_name_is_left_out() -> None:
    assert extras_of([["a", "salt"], ["a"]], None, "a", 2) == [("salt",), ()]
    assert extras_of([["a"]], None, None, 1) == [("a",)]


def test_keys_may_be_scalars_or_pairs() -> None:
    assert extras_of(["salt", [["image", 3]]], None, None, 2) == [("salt",), (["image", 3],)]


def test_tensorrt_images_are_written_as_those_of_vllm() -> None:
    image = {"type": "mm_key", "hash": "image", "start_offset": 3}
    found = extras_of([["k"], None], [None, [image]], None, 2)
    assert found == [("k",), (["image", 3],)]


@pytest.mark.parametrize(
    "keys", [{"cache_salt": "tenant"}, [None, None], [[[["nested"]]]], [[{"a": 1}]]]
)
def test_invalid_extra_keys_are_refused(keys: object) -> None:
    with pytest.raises(Skipped, match="bad_extra_keys"):
        extras_of(keys, None, None, 1)


@pytest.mark.parametrize(
    "images", ["image", [], ["image"], [["image"]], [[{}]], [[{"hash": {}, "start_offset": 0}]]]
)
def test_invalid_image_keys_are_refused(images: object) -> None:
    with pytest.raises(Skipped, match="bad_mm_keys"):
        extras_of(None, images, None, 1)


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
