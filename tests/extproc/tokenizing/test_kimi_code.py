"""What is read of the code of a Kimi checkpoint's tokenizer, which never runs."""

import pytest

from extproc.tokenizing.kimi_code import MAX_CODE_BYTES, KimiCode, read_code
from extproc.tokenizing.split_patterns import KIMI, TEKKEN, check_pattern
from tests.extproc.small_models import KIMI_CODE, kimi_settings

CODE = read_code(KIMI_CODE.encode())


def test_code_is_read_and_not_run() -> None:
    assert KimiCode(KIMI, 258, sorts_tools=True, writes_tools=False) == CODE
    bare = KIMI_CODE.replace(" + 2", "").replace(
        "deep_sort_dict", "encode_tools_to_typescript_style"
    )
    assert read_code(bare.encode()) == KimiCode(KIMI, 256, sorts_tools=False, writes_tools=True)
    plain = KIMI_CODE.partition("pat_str =")
    single = (
        f"{plain[0]}pat_str = {KIMI!r}\n    other = '|'.join([name])\n"
        + plain[2].partition("\n")[2]
    )
    assert read_code(single.encode()).pattern == KIMI


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (b"#" * (MAX_CODE_BYTES + 1), "more than 65536 bytes"),
        (b"def", "no Python code"),
        (b"\0", "no Python code"),
        (b"(" * 1_000, "no Python code"),
        (b"class Other:\n    pass", "not the one that is known"),
        (KIMI_CODE.replace("25_000", "20_000").encode(), "not the one that is known"),
        (KIMI_CODE.replace("= 256", "= '256'").encode(), "not the one that is known"),
        (KIMI_CODE.replace("= 256", "= 999999999").encode(), "too many tokens"),
    ],
)
def test_other_code_is_refused(source: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_code(source)


def test_special_tokens_are_numbered_where_they_have_no_name() -> None:
    named = kimi_settings()["added_tokens_decoder"]
    found = CODE.special_tokens(1_200, named)
    assert (found["[BOS]"], found["<|reserved_token_1205|>"], len(found)) == (1200, 1205, 258)
    assert CODE.special_tokens(5, None)["<|reserved_token_5|>"] == 5


@pytest.mark.parametrize(
    "named",
    [
        {"1": {"content": "x"}},
        {"1200": {"content": "<|reserved_token_1201|>"}},
        {"1200": {"content": "x", "lstrip": True}},
        {"1200": "x"},
        {"x": {"content": "x"}},
    ],
)
def test_special_tokens_of_another_form_are_refused(named: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="special tokens"):
        CODE.special_tokens(1_200, named)


def test_patterns_are_known_or_refused() -> None:
    check_pattern(TEKKEN)
    with pytest.raises(ValueError, match="not known here"):
        check_pattern("(a+)+$")
