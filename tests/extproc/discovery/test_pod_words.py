from collections.abc import Callable

import pytest

from extproc.discovery import pods
from extproc.discovery.pods import Metadata, Pod, PodWords


def words(**annotations: str) -> PodWords:
    said = {f"kvsteer.io/{key}": value for key, value in annotations.items()}
    return PodWords(Pod(Metadata("p", annotations=said, labels={"model.aibrix.ai/name": "m"})))


def test_a_pod_says_something_in_annotations_and_labels() -> None:
    said = words(port=" 8000 ")
    assert said.annotation("port", pods.port_in) == 8000
    assert said.label("name", pods.text_in) == "m"
    assert said.annotation("model", pods.text_in) is None
    assert said.notes == ()


def test_a_pod_without_annotations_says_nothing() -> None:
    assert PodWords(Pod(Metadata("p"))).annotation("port", pods.port_in) is None


def test_what_cannot_be_read_is_noted_once_and_cut() -> None:
    said = words(port="x" * 300)
    assert [said.annotation("port", pods.port_in) for _ in range(2)] == [None, None]
    assert said.notes == (f"pod p: kvsteer.io/port: cannot be read: {'x' * 40!r}",)


def test_active_ports_are_those_of_the_newer_annotation() -> None:
    new, old = pods.ACTIVE_PORTS
    pod = Pod(Metadata("p", annotations={new: "8000, x,", old: "8001"}))
    said = PodWords(pod)
    assert said.active_ports() == frozenset({8000})
    assert said.notes == (f"pod p: {new}: cannot be read: 'x'",)
    assert PodWords(Pod(Metadata("p", annotations={old: "8001"}))).active_ports() == frozenset(
        {8001}
    )
    assert PodWords(Pod(Metadata("p"))).active_ports() is None


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (pods.number_in, "0", 0),
        (pods.ports_in, "8000, 8001", (8000, 8001)),
        (pods.ranks_in, "64", 64),
        (pods.names_in, "x, y", ("x", "y")),
        (pods.flag_in, "TRUE", True),
        (pods.flag_in, "false", False),
        (pods.auto_or_none_in, "auto", "auto"),
        (pods.service_in, "vllm", "vllm"),
    ],
)
def test_words_are_read(read: Callable[[str], object], text: str, expected: object) -> None:
    assert read(text) == expected


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (pods.number_in, "1" * 19),
        (pods.number_in, "\u0663"),
        (pods.positive_in, "0"),
        (pods.port_in, "65536"),
        (pods.ports_in, "1,1"),
        (pods.ports_in, "1,2,3,4,5,6,7,8,9"),
        (pods.ranks_in, "65"),
        (pods.text_in, ""),
        (pods.flag_in, "yes"),
    ],
)
def test_words_of_another_kind_are_refused(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(ValueError, match=r"^$"):
        read(text)
