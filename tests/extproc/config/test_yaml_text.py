import time

import pytest

from extproc.config.reader import values_in


def test_values_are_plain() -> None:
    assert values_in("a: [1, {b: c}]") == ({"a": [1, {"b": "c"}]}, [])
    assert values_in(b"") == (None, [])


def test_keys_that_are_given_twice_are_told_with_their_lines() -> None:
    text = """
workers:
- events: {zmq: a, zmq: b}
policy: {name: x}
policy: {name: y, name: z}
"""
    assert values_in(text)[1] == [
        "workers[0].events.zmq: given in line 3 and again in line 3",
        "policy: given in line 4 and again in line 5",
        "policy.name: given in line 5 and again in line 5",
    ]


def test_a_number_and_its_text_are_two_keys() -> None:
    assert values_in("{1: a, '1': b}") == ({1: "a", "1": "b"}, [])


def test_a_merged_mapping_may_be_overridden_and_used_again() -> None:
    text = "[&a {x: 1}, &b {<<: *a, x: 2}, {<<: *b, x: 3}, {<<: *a, <<: *b}]"
    values, doubles = values_in(text)
    assert (values[2], doubles) == ({"x": 3}, [])


def test_an_alias_may_lead_in_a_circle() -> None:
    values, doubles = values_in("&a {x: *a, x: 1}")
    assert (values["x"], doubles) == (1, ["x: given in line 1 and again in line 1"])


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a: [", "line 1, column 5: while parsing a flow node, expected the node content"),
        (b"{", "line 1, column 2: "),
        ("a: 1\n---\nb: 2", "line 2, column 1: expected a single document"),
        ("{[a]: 1}", "line 1, column 2: while constructing a mapping, found unhashable key"),
        (b"a: \xff", "unacceptable character #x00ff: invalid start byte at position 3"),
        ("a: !!bool x", "a value does not fit its tag"),
        ("a: !!timestamp x", "a value does not fit its tag"),
        ("a: 2026-99-99", "month must be in 1..12"),
        ("[" * 5000, "maximum recursion depth exceeded"),
    ],
)
def test_what_is_no_yaml_is_told_with_its_place(text: str | bytes, why: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - its text is looked at below
        values_in(text)
    assert str(caught.value).startswith(why)
    assert "<" not in str(caught.value).replace("<stream end>", "")


def nested(line: str, count: int, depth: int) -> str:
    """Each line holds the one before so many times; the braces in it take the aliases."""
    lines = ["a0: &a0 {x: 1}"]
    for n in range(1, depth):
        aliases = ", ".join([f"*a{n - 1}"] * count)
        lines.append(f"a{n}: &a{n} " + line.format(aliases))
    return "\n".join(lines)


@pytest.mark.parametrize("line", ["{{<<: [{}]}}", "[{}]"])
def test_aliases_that_stand_for_millions_of_values_are_refused_at_once(line: str) -> None:
    text = nested(line, 16, 7)
    assert len(text) < 1_000
    began = time.process_time()
    with pytest.raises(ValueError, match=r"its aliases .* stand for more than 200000 values"):
        values_in(text)
    assert time.process_time() - began < 1


def test_as_many_aliases_as_may_be_are_taken_in_seconds() -> None:
    began = time.process_time()
    assert values_in(nested("{{<<: [{}]}}", 10, 5))[0]["a4"] == {"x": 1}
    assert time.process_time() - began < 5


def test_aliases_of_a_whole_fleet_are_taken() -> None:
    worker = "{{<<: *common, endpoint: '10.0.{}.{}:1', events: *events}}"
    workers = "".join(f"- {worker.format(n // 250, n % 250)}\n" for n in range(2_000))
    common = "events: &events {zmq: a, replay: b, ranks: 1}\ncommon: &common {a: 1, b: {c: 2}}\n"
    values, doubles = values_in(f"{common}workers:\n{workers}")
    assert len(values["workers"]) == 2_000
    assert not doubles
