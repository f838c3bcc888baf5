"""Edits in place, in every form of YAML in which an envoy.yaml is written."""

import json

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from extproc.base.errors import ConfigError
from kvtools.envoy.yaml_edit import MAX_CHARACTERS, KeyPath, YamlText


def edited(text: str, *edits: tuple[str, KeyPath, str | int, object]) -> str:
    file = YamlText(text, "f")
    for kind, path, key, value in edits:
        if kind == "put":
            file.put(path, str(key), value, "why")
        elif kind == "insert":
            file.insert(path, int(key), value, "why")
        else:
            file.replace(path, kind, str(key), value)
    return file.edited()


def refusal(text: str, *edits: tuple[str, KeyPath, str | int, object]) -> str:
    with pytest.raises(ConfigError) as caught:
        edited(text, *edits)
    return str(caught.value)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a:\n  b: 1  # one\n# end\n", "a:\n  b: 1  # one\n  # why\n  c: {}\n# end\n"),
        ("a:\n  b: 1", "a:\n  b: 1\n  # why\n  c: {}"),
        ("a:\n  b:\n    - x\nd: 1\n", "a:\n  b:\n    - x\n  # why\n  c: {}\nd: 1\n"),
        ("a:\r\n  b: 1\r\n", "a:\r\n  b: 1\r\n  # why\r\n  c: {}\r\n"),
        ("a:\n  b: |\n    t\n\n# end\n", "a:\n  b: |\n    t\n\n  # why\n  c: {}\n# end\n"),
        ("a: {b: 1}  # flow\n", 'a: {b: 1, "c": {}}  # flow\n'),
        ("a: {}\n", 'a: {"c": {}}\n'),
        ("a:\n  c:\n  b: 1\n", "a:\n  c: {}\n  b: 1\n"),
        (
            '{\n\t"a": {\n\t\t"b": "\\t"\n\t}\n}',
            '{\n\t"a": {\n\t\t"b": "\\t",\n\t\t"c": {}\n\t}\n}',
        ),
        ("x: &x {z: 1}\na:\n  b: *x\n", "x: &x {z: 1}\na:\n  b: *x\n  # why\n  c: {}\n"),
        ("x: &x 1\na:\n  b: *x\n", "x: &x 1\na:\n  b: *x\n  # why\n  c: {}\n"),
        ("a: {b: .nan, d: 0x_}\n", 'a: {b: .nan, d: 0x_, "c": {}}\n'),
    ],
)
def test_put_adds_a_key_at_the_end_of_its_mapping(before: str, after: str) -> None:
    assert edited(before, ("put", ("a",), "c", {})) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("l:\n  - a\n  # last\n  - b\n", "l:\n  - a\n  # why\n  - n\n  # last\n  - b\n"),
        ("l:\n- a\n- b: 1\n", "l:\n- a\n# why\n- n\n- b: 1\n"),
        ("# top\n- a\n- b\n", "# top\n- a\n# why\n- n\n- b\n"),
        ("l: [a, b]\n", 'l: [a, "n", b]\n'),
        ('{"l": [\n  1,\n  2\n]}', '{"l": [\n  1,\n  "n",\n  2\n]}'),
    ],
)
def test_insert_places_an_item_above_the_comments_of_the_next(before: str, after: str) -> None:
    path = () if before.startswith("#") else ("l",)
    assert edited(before, ("insert", path, 1, "n")) == after


def test_insert_places_an_item_at_the_very_top() -> None:
    assert edited("# top\n- a\n", ("insert", (), 0, "n")) == "# why\n- n\n# top\n- a\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("l:\n  - a\n", "l:\n  - a\n  # why\n  - n\n"),
        ("l: [a]\n", 'l: [a, "n"]\n'),
        ("l: []\n", 'l: ["n"]\n'),
    ],
)
def test_insert_appends_an_item(before: str, after: str) -> None:
    place = 0 if "[]" in before else 1
    assert edited(before, ("insert", ("l",), place, "n")) == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a: 1\nb: 2 # two\nc: 3\n", "a: 1\nn:\n  x: 1\nc: 3\n"),
        ("- a: 1\n  b: 2\n", "- a: 1\n  n:\n    x: 1\n"),
        ("{a: 1, b: 2}\n", '{a: 1, "n": {"x": 1}}\n'),
    ],
)
def test_replace_takes_an_entry_and_its_comment(before: str, after: str) -> None:
    path: KeyPath = (0,) if before.startswith("-") else ()
    assert edited(before, ("b", path, "n", {"x": 1})) == after


def test_edits_at_one_place_are_ordered_by_depth() -> None:
    text = edited("a:\n  b:\n    c: 1\n", ("put", ("a",), "o", 1), ("put", ("a", "b"), "i", 2))
    assert yaml.safe_load(text) == {"a": {"b": {"c": 1, "i": 2}, "o": 1}}
    assert edited("a: {}\n", ("put", ("a",), "b", 1), ("put", ("a",), "c", 2)) == (
        'a: {"b": 1, "c": 2}\n'
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("x: &x {b: 1}\na: *x\n", "a: is used in several places by an anchor"),
        ("a: &x {b: 1}\nx: *x\n", "a: is used in several places by an anchor"),
        ("a:\n  <<: {b: 1}\n", "merge keys"),
        ("a: {b: 1, b: 2}\n", "the key 'b' twice"),
        ("a: !mine {b: 1}\n", "has the tag !mine"),
        ("a: {b: !mine 1}\n", "has the tag !mine"),
        ("a: {? [x] : 1}\n", "a key that is not text"),
        ("a: &a [*a]\n", "an anchor contains itself"),
        ("a: [\n", "cannot be read as YAML"),
        ("a: 1\n---\nb: 2\n", "cannot be read as YAML"),
        ("a: \x00\n", "cannot be read as YAML"),
        ("\tb: 1\n", "cannot be read as YAML"),
        ("# nothing\n", "empty"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("\t" + "[" * 5000, "cannot be read as YAML"),
        ("a: |\n" + " x\n" * MAX_CHARACTERS, "larger than 1048576 characters"),
        ("a:\n  ? b\n  : 1\n", "written in a form"),
    ],
)
def test_unknown_structure_is_refused_with_its_place(text: str, why: str) -> None:
    found = refusal(text, ("put", ("a",), "c", {}), ("put", ("a",), "d", 1))
    assert found.startswith("f: ")
    assert why in found


def test_aliases_count_as_their_values() -> None:
    laughs = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    laughs += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    assert "more than 200000 values" in refusal("\n".join(laughs))


@pytest.mark.parametrize("text", ["l:\n  -\n    a: 1\n", "l:\n  - - a\n"])
def test_list_of_an_unusual_form_is_refused(text: str) -> None:
    path: KeyPath = ("l", 0) if "- -" in text else ("l",)
    assert "unusual form" in refusal(text, ("insert", path, 1, "n"))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="ascii"), max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", max_size=3), inner),
    max_leaves=8,
)


@given(VALUES, VALUES, st.sampled_from(["block", "flow", "json", "lines"]))
@example(None, [["\x7f\x9f\ufffe"]], "flow")
def test_edit_changes_nothing_else_in_any_form(around: object, value: object, form: str) -> None:
    tree = {"before": around, "a": {"b": around}, "l": [around], "after": around}
    forms = {
        "block": yaml.safe_dump(tree, sort_keys=False, allow_unicode=True),
        "flow": yaml.safe_dump(tree, sort_keys=False, default_flow_style=True),
        "json": json.dumps(tree),
        "lines": json.dumps(tree, indent=2),
    }
    text = edited(forms[form], ("put", ("a",), "c", value), ("insert", ("l",), 0, value))
    assert YamlText(text, "f").value == {
        **YamlText(forms[form], "f").value,
        "a": {**YamlText(forms[form], "f").value["a"], "c": value},
        "l": [value, *YamlText(forms[form], "f").value["l"]],
    }
