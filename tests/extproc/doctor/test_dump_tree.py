import pytest

from extproc.doctor.envoy_dump import listing, mapping, nodes, number, seconds, type_of, typed

TREE = {"a": [{"@type": "x.Y", "b": 1}, 2, [{"@type": "x.Z"}]], "c": {"@type": "w.Y"}}


def test_every_mapping_in_a_tree_is_found() -> None:
    assert len(list(nodes(TREE))) == 4
    assert list(nodes("nothing")) == []


def test_mappings_are_found_by_their_type() -> None:
    assert [one["@type"] for one in typed(TREE, ".Y")] == ["w.Y", "x.Y"]
    assert (type_of({"@type": "x"}), type_of({}), type_of(1)) == ("x", "", "")


def test_what_has_another_shape_is_empty() -> None:
    assert (mapping({"a": 1}), mapping([1]), mapping(None)) == ({"a": 1}, {}, {})
    assert (listing([1]), listing({"a": 1}), listing(None)) == ([1], [], [])


@pytest.mark.parametrize(
    ("value", "expected"),
    [("12", 12), (12, 12), (None, 7), ("-1", 7), ("1" * 20, 7), ("\N{SUPERSCRIPT TWO}", 7)],
)
def test_numbers_are_read_where_they_are_some(value: object, expected: int) -> None:
    assert number(value, 7) == expected


def test_durations_are_read_where_they_are_some() -> None:
    assert (seconds("0.5s", 7.0), seconds(None, 7.0)) == (0.5, 7.0)
