"""The lines of faults in a configuration."""

import pytest

from extproc.config.lines import in_order

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
    assert in_order(TEXT, [fault]) == [f"{fault} (line {line})"]


def test_fault_gets_the_line_of_each_item_that_it_names() -> None:
    fault = "workers[1].endpoint: a:1 is the endpoint of workers[0] too, not of workers[9]"
    assert in_order(TEXT, [fault]) == [f"{fault} (line 6; workers[0] in line 5)"]


@pytest.mark.parametrize(
    "fault",
    [
        "configuration: must be a mapping",
        "discovery.file: missing",
        "models[0].name: given in line 1 and again in line 2",
    ],
)
def test_fault_without_a_key_or_with_a_line_stays_as_it_is(fault: str) -> None:
    assert in_order(TEXT, [fault]) == [fault]


@pytest.mark.parametrize("text", ["{", b"\xff\xfe\xfa", "", "&a [*a]", "x", "!!bool x"])
def test_any_text_leaves_its_faults(text: str | bytes) -> None:
    assert in_order(text, ["key: wrong"]) == ["key: wrong"]


def test_faults_stand_in_the_order_of_their_keys_and_the_rest_is_last() -> None:
    faults = ["none: x", "again[0]: x", "workers[1].model: x", "models[0].lora: x", "models: x"]
    assert [one.partition(": ")[0] for one in in_order(TEXT, faults)] == [
        "models",
        "models[0].lora",
        "workers[1].model",
        "again[0]",
        "none",
    ]


def test_items_of_a_list_without_a_name_get_their_lines() -> None:
    fault = "[1].endpoint: a:1 is the endpoint of [0] too"
    text = "- endpoint: a:1\n- endpoint: a:1\n"
    assert in_order(text, [fault]) == [f"{fault} (line 2; [0] in line 1)"]
