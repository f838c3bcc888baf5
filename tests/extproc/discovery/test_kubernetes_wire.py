import json
from typing import Any

import msgspec
import pytest

from extproc.discovery.pods import (
    Pod,
    Pool,
    Refusal,
    read_event,
    read_listing,
    read_refusal,
    read_thing,
    read_version,
)

NONSENSE = [b"", b"[]", b"1", b'{"metadata": 1}', b"[" * 5000, b'{"type": 1}', b"\xff"]


def raw(thing: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(thing).encode())


def test_a_page_of_a_list_is_read() -> None:
    page = read_listing(
        b'{"metadata": {"resourceVersion": "7", "continue": "x"}, "items": [{}, 1]}'
    )
    assert page is not None
    assert (page.metadata.resource_version, page.metadata.continues) == ("7", "x")
    assert [bytes(one) for one in page.items or ()] == [b"{}", b"1"]


def test_an_event_is_read() -> None:
    event = read_event(b'{"type": "ADDED", "object": {"metadata": {"resourceVersion": "9"}}}')
    assert event is not None
    assert (event.type, read_version(event.object)) == ("ADDED", "9")


@pytest.mark.parametrize("body", NONSENSE)
def test_nonsense_is_none_of_it(body: bytes) -> None:
    assert read_listing(body) is None
    assert read_event(body) is None
    assert read_thing(msgspec.Raw(body), Pod) is None
    assert read_version(msgspec.Raw(body)) == ""
    assert read_refusal(body) == Refusal()


def test_a_pod_is_read_with_all_that_counts() -> None:
    pod = read_thing(
        raw({"metadata": {"uid": "u", "labels": None}, "status": {"podIP": "10.0.0.1", "x": 1}}),
        Pod,
    )
    assert pod is not None
    assert (pod.status.pod_ip, pod.metadata.labels) == ("10.0.0.1", None)


def test_a_pool_is_read_with_all_that_counts() -> None:
    spec = {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": 1}]}
    pool = read_thing(raw({"metadata": {"uid": "u"}, "spec": spec}), Pool)
    assert pool is not None
    assert (pool.spec.selector.match_labels, pool.spec.target_ports[0].number) == ({"a": "b"}, 1)


def test_an_object_without_an_identity_is_none() -> None:
    assert read_thing(raw({"metadata": {}}), Pod) is None


def test_a_refusal_says_why() -> None:
    assert read_refusal(b'{"code": 410, "reason": "Expired"}') == Refusal(410, "Expired", "")
