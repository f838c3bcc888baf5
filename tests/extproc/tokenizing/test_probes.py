import unicodedata

import pytest

from extproc.tokenizing.encoder_choice import PLAIN, probes
from extproc.tokenizing.tokenizer_layout import AddedToken


def tokens(count: int, **flags: bool) -> list[AddedToken]:
    kind = "".join(sorted(flags))
    return [AddedToken(number, f"<{kind}{number}>", **flags) for number in range(count)]


CATEGORIES = (
    "Lu",
    "Ll",
    "Lt",
    "Lm",
    "Lo",
    "Mn",
    "Mc",
    "Nd",
    "Nl",
    "No",
    "Pc",
    "Pd",
    "Ps",
    "Pe",
    "Pi",
    "Pf",
    "Po",
    "Sm",
    "Sc",
    "Sk",
    "So",
    "Zs",
    "Zl",
    "Zp",
    "Cc",
    "Cf",
    "Co",
)


@pytest.mark.parametrize("category", CATEGORIES)
def test_probes_contain_characters_of_every_category(category: str) -> None:
    assert any(unicodedata.category(one) == category for text in PLAIN for one in text)


def test_probes_exist_without_added_tokens() -> None:
    assert set(PLAIN) < set(probes([]))


def test_probes_hold_added_tokens_of_each_kind_in_three_positions() -> None:
    texts = probes([*tokens(3, lstrip=True), *tokens(1, normalized=False)])
    for token in ("<lstrip0>", "<lstrip2>", "<normalized0>"):
        assert token in texts
        assert any(f"{token}{token}" in text for text in texts)
        assert any(f"  {token}" in text for text in texts)


def test_probes_try_few_of_thousands_of_tokens() -> None:
    texts = probes([*tokens(5_000), *tokens(2, rstrip=True)])
    assert len(texts) < 150
    assert sum(len(text) for text in texts) < 40_000
    assert "<rstrip1>" in texts
    assert any("<4" in text for text in texts)
