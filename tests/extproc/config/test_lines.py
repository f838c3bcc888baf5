"""The lines of faults in a configuration."""

import pytest

from extproc.config.lines import with_lines

TEXT = """\
models:
- name: m
  lora: [a, b]
workers: &w
- endpoint: a:1
- {endpoint: b:1,
   model: x}
again: *w
? [1]
: 2
"""


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("models[0].name: wrong", 2),
        ("models[0].lora[1]: wrong", 3),
        ("models[0].tokenizer: missing", 2),
        ("workers[1].model: wrong", 7),
        ("workers: wrong", 4),
        ("again[0].endpoint: wrong", 8),  # an alias: the line at which it stands
    ],
)
def test_fault_gets_the_line_of_its_key_or_of_what_contains_it(fault: str, line: int) -> None:
    assert with_lines(TEXT, "c", [f"c: {fault}"]) == [f"c: {fault} (line {line})"]


def test_fault_gets_the_line_of_each_item_that_it_names() -> None:
    fault = "c: workers[1].endpoint: a:1 is the endpoint of workers[0] too, not of workers[9]"
    assert with_lines(TEXT, "c", [fault]) == [f"{fault} (line 6; workers[0] in line 5)"]


@pytest.mark.parametrize(
    "fault",
    [
        "c: configuration: must be a mapping",
        "c: log.level: given in line 1 and again in line 2",
        "c: not YAML: line 1, column 2: no",
        "and 3 more faults",
    ],
)
def test_fault_without_a_key_stays_as_it_is(fault: str) -> None:
    assert with_lines(TEXT, "c", [fault]) == [fault]


@pytest.mark.parametrize("text", ["{", b"\xff\xfe\xfa", "", "&a [*a]", "x", "!!bool x"])
def test_any_text_leaves_its_faults(text: str | bytes) -> None:
    assert with_lines(text, "c", ["c: key: wrong"]) == ["c: key: wrong"]
