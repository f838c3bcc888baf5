import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.config.schema import EventPorts, FoundWorker, Model, WorkerEngine, WorkerEvents
from extproc.fleet.discovery import pods
from extproc.fleet.discovery.pods import (
    PAGE,
    Engines,
    Metadata,
    Pod,
    PodSettings,
    PodWords,
    Pool,
    RefusalStatus,
    read_event,
    read_listing,
    read_refusal,
    read_thing,
    read_version,
)
from extproc.fleet.discovery.view import Sighting
from tests.extproc.fleet.discovery import api_server

MODELS = (Model("a", lora=("x", "y")), Model("b", lora=("z",)))


def pod(name: str = "p", ip: str = "10.0.0.1", **more: Any) -> Pod:
    listing = read_listing(
        json.dumps({"metadata": {}, "items": [api_server.pod(name, ip, **more)]}).encode()
    )
    assert listing is not None
    assert listing.items is not None
    read = read_thing(listing.items[0], Pod)
    assert read is not None
    return read


def found(
    *pods: Pod, of_all: FoundWorker | None = None, **asked: Any
) -> tuple[list[Sighting], list[str]]:
    view, notes = Engines(PodSettings(of_all or FoundWorker(model="a"), MODELS, **asked)).read_all(
        pods
    )
    return list(view), notes


def only(*pods: Pod, **more: Any) -> Sighting:
    (one,), notes = found(*pods, **more)
    assert notes == []
    return one


def noted(*pods: Pod, **more: Any) -> tuple[Sighting, str]:
    (one,), (note,) = found(*pods, **more)
    return one, note


def annotated(**annotations: str) -> Pod:
    return pod(
        annotations={
            f"kvsteer.io/{key.replace('_', '-')}": value for key, value in annotations.items()
        }
    )


def labelled(**labels: str) -> Pod:
    return pod(
        labels={f"model.aibrix.ai/{key.replace('_', '-')}": value for key, value in labels.items()}
    )


def test_pod_is_a_worker_as_configured() -> None:
    one = only(pod())
    assert (one.worker.endpoint, one.worker.model, one.worker.events) == (
        "10.0.0.1:8000",
        "a",
        None,
    )
    assert (one.identity, one.excluded, one.worker.draining) == ("uid-p", "", False)


def test_finished_pods_and_pods_without_an_address_are_no_workers() -> None:
    over = [pod(phase="Succeeded"), pod(phase="Failed"), pod(ip="")]
    assert found(*over) == ([], [])


@pytest.mark.parametrize("ip", ["name", "10.0.0.1:5", "a b"])
def test_invalid_address_of_a_pod_is_noted(ip: str) -> None:
    assert found(pod(ip=ip)) == ([], ["pod p: its podIP is no IP address"])


def test_ipv6_addresses_are_bracketed() -> None:
    assert only(pod(ip="fd00::1")).worker.endpoint == "[fd00::1]:8000"


def test_terminating_pods_drain_and_unready_pods_are_excluded() -> None:
    assert only(pod(deleted=True)).worker.draining
    assert only(annotated(draining="true")).worker.draining
    assert only(pod(ready=False)).excluded == "its pod is not ready"


def test_newer_pod_counts_of_two_with_one_address() -> None:
    old, new = (
        pod("old", created="2026-01-01T00:00:00Z"),
        pod("new", created="2026-02-01T00:00:00Z"),
    )
    one, note = noted(old, new)
    assert one.identity == "uid-new"
    assert note == "pods new and old both have 10.0.0.1:8000"
    assert noted(pod("old"), pod("new", deleted=True))[0].identity == "uid-old"
    assert noted(pod("old"), pod("new", ready=False))[0].identity == "uid-old"


def test_annotations_name_ports_and_feeds() -> None:
    one = only(
        annotated(
            port="9000", zmq_port="6000", replay_port="6100", topic="kv", ranks="2",
            block_size="64", model="b", lora="z, w", service="sglang",
        )
    )  # fmt: skip
    assert one.worker.endpoint == "10.0.0.1:9000"
    assert one.worker.events == WorkerEvents(
        "tcp://10.0.0.1:6000", "tcp://10.0.0.1:6100", "kv", ranks=2, service="sglang"
    )
    assert (one.worker.model, one.worker.block_size, one.worker.lora) == ("b", 64, ("z", "w"))


def test_grpc_feed_of_a_pod_replaces_the_configured_one() -> None:
    of_all = FoundWorker(model="a", events=EventPorts(5557, 5657))
    assert only(annotated(grpc_port="50051"), of_all=of_all).worker.events == WorkerEvents(
        grpc="10.0.0.1:50051"
    )


def test_events_annotation_asks_for_feeds_or_forgoes_them() -> None:
    of_all = FoundWorker(model="a", events=EventPorts(5557))
    assert only(annotated(events="auto"), of_all=of_all).worker.events == "auto"
    assert only(annotated(events="none"), of_all=of_all).worker.events is None


def test_port_annotation_with_several_ports_makes_several_engines() -> None:
    of_all = FoundWorker(model="a", events=EventPorts(5557))
    view, _ = found(annotated(port="8000, 8001"), of_all=of_all)
    assert [one.worker.endpoint for one in view] == ["10.0.0.1:8000", "10.0.0.1:8001"]
    assert view[1].worker.events == WorkerEvents("tcp://10.0.0.1:5558")
    view, _ = found(pod(), ports=(8000, 8001, 8002))
    assert len(view) == 3


def test_aibrix_labels_are_read() -> None:
    one = only(labelled(name="b", port="8080", kv_events_enabled="true", lora_id="7"))
    assert (one.worker.endpoint, one.worker.model) == ("10.0.0.1:8080", "b")
    assert one.worker.events == WorkerEvents("tcp://10.0.0.1:5557", "tcp://10.0.0.1:5558")
    assert one.adapters == ((7, "z"),)


def test_aibrix_label_turns_events_off() -> None:
    of_all = FoundWorker(model="a", events=EventPorts(5557))
    assert only(labelled(kv_events_enabled="false"), of_all=of_all).worker.events is None


def test_adapter_number_without_its_name_is_noted() -> None:
    one, note = noted(labelled(lora_id="7"))
    assert one.adapters == ()
    assert note == (
        "pod p: model.aibrix.ai/lora-id: which adapter it numbers is not known; name it in"
        " kvsteer.io/lora"
    )


def test_pod_of_the_only_model_needs_no_model_annotation() -> None:
    labels = {"model.aibrix.ai/lora-id": "1"}
    asked = PodSettings(FoundWorker(), (Model("a", lora=("x",)),))
    view, notes = Engines(asked).read_all([pod(labels=labels)])
    assert (view[0].adapters, notes) == (((1, "x"),), [])


def test_engine_annotation_counts_more_than_what_all_pods_run() -> None:
    of_all = FoundWorker(engine=WorkerEngine("vllm", "0.24.0"))
    (one,), _ = found(pod(), of_all=of_all)
    assert (one.worker.engine, one.engine_source) == (of_all.engine, "configured")
    (one,), _ = found(annotated(engine="sglang/0.5.23"), of_all=of_all)
    annotation = WorkerEngine("sglang", "0.5.23")
    assert (one.worker.engine, one.engine_source) == (annotation, "annotation")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("engine", "vllm"), ("engine", "tgi/1.0.0"), ("engine", "vllm/latest"),
        ("port", "0"), ("port", "70000"), ("port", "8000,8000"), ("port", "x"),
        ("block_size", "²"), ("model", ""), ("lora", "a,,b"), ("draining", "perhaps"),
        ("events", "zmq"), ("zmq_port", "9" * 30),
    ],
)  # fmt: skip
def test_unreadable_annotation_is_noted_and_left_out(key: str, value: str) -> None:
    one, note = noted(annotated(**{key: value}))
    assert one.worker.endpoint == "10.0.0.1:8000"
    assert note.startswith(f"pod p: kvsteer.io/{key.replace('_', '-')}: cannot be read: ")


NEW, OLD = "llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports"


@pytest.mark.parametrize(
    ("annotations", "ports"),
    [
        ({NEW: "8002, 8000"}, [8000, 8002]),
        ({OLD: "8001"}, [8001]),
        ({NEW: "8000", OLD: "8001"}, [8000]),
        ({NEW: ""}, []),
        ({NEW: "8001,9999"}, [8001]),
        ({NEW: "8001", "kvsteer.io/port": "7000"}, [7000]),
    ],
)
def test_active_ports_select_the_ports_of_a_pool(
    annotations: dict[str, str], ports: list[int]
) -> None:
    view, notes = found(pod(annotations=annotations), ports=(8000, 8001, 8002))
    assert [one.worker.endpoint for one in view] == [f"10.0.0.1:{port}" for port in ports]
    assert notes == []


def test_active_port_takes_the_event_port_of_its_place_in_the_pool() -> None:
    of_all = FoundWorker(model="a", events=EventPorts(5557))
    (one,), _ = found(pod(annotations={NEW: "8001"}), of_all=of_all, ports=(8000, 8001))
    assert one.worker.events == WorkerEvents("tcp://10.0.0.1:5558")


def test_active_ports_that_are_invalid_are_noted() -> None:
    view, notes = found(pod(annotations={NEW: "x,8001"}), ports=(8000, 8001))
    assert [one.worker.endpoint for one in view] == ["10.0.0.1:8001"]
    assert notes == [f"pod p: {NEW}: cannot be read: 'x'"]


def test_active_ports_outside_the_pool_are_noted() -> None:
    notes = ["pod p: none of its active ports is one of the pool's"]
    assert found(pod(annotations={NEW: "9000"}), ports=(8000,)) == ([], notes)


def test_unknown_service_is_noted() -> None:
    one, note = noted(annotated(grpc_port="1", service="mine"))
    assert one.worker.events == WorkerEvents(grpc="10.0.0.1:1")
    assert note == "pod p: kvsteer.io/service: cannot be read: 'mine'"


def test_ranks_beyond_the_limit_are_noted() -> None:
    one, note = noted(annotated(zmq_port="1", ranks="5000"))
    assert one.worker.events == WorkerEvents("tcp://10.0.0.1:1")
    assert note == "pod p: kvsteer.io/ranks: cannot be read: '5000'"


def test_fault_of_a_pod_is_noted_once() -> None:
    labels = {"model.aibrix.ai/lora-id": "7", "model.aibrix.ai/port": "1,2"}
    _, notes = found(pod(labels=labels))
    assert len(notes) == 1


def test_feed_with_impossible_ports_is_left_out() -> None:
    one, note = noted(annotated(zmq_port="5557", replay_port="5558", ranks="2"))
    assert one.worker.events is None
    assert note.startswith("pod p: its events: with 2 ranks the ports of zmq and replay overlap")


def test_ports_beyond_65535_are_noted() -> None:
    of_all = FoundWorker(model="a", events=EventPorts(65535))
    view, notes = found(annotated(port="1,2"), of_all=of_all)
    assert [one.worker.events is None for one in view] == [False, True]
    assert notes == ["pod p: its event ports are above 65535"]


def test_unconfigured_model_is_noted_once() -> None:
    one, note = noted(labelled(name="who"))
    assert one.worker.model == "who"
    assert note == "pod p: its model 'who' is not under models"


def test_unchanged_pod_is_not_read_again() -> None:
    same, other = pod("same"), pod("other", "10.0.0.2")
    engines = Engines(PodSettings(FoundWorker(model="a"), MODELS))
    (before, _), _ = engines.read_all([same, other])
    (after, changed), _ = engines.read_all([same, pod("other", "10.0.0.3")])
    assert after is before
    assert changed.worker.endpoint == "10.0.0.3:8000"
    assert engines.read_all([]) == ((), [])


def test_note_cuts_a_long_annotation() -> None:
    _, note = noted(annotated(model="m" * 200_000))
    assert len(note) < 120


def words(**annotations: str) -> PodWords:
    said = {f"kvsteer.io/{key}": value for key, value in annotations.items()}
    return PodWords(Pod(Metadata("p", annotations=said, labels={"model.aibrix.ai/name": "m"})))


def test_pod_words_read_annotations_and_labels() -> None:
    said = words(port=" 8000 ")
    assert said.annotation("port", pods.port_in) == 8000
    assert said.label("name", pods.text_in) == "m"
    assert said.annotation("model", pods.text_in) is None
    assert said.notes == ()


def test_pod_words_are_empty_without_annotations() -> None:
    assert PodWords(Pod(Metadata("p"))).annotation("port", pods.port_in) is None


def test_pod_words_note_an_unreadable_annotation_once_and_cut() -> None:
    said = words(port="x" * 300)
    assert [said.annotation("port", pods.port_in) for _ in range(2)] == [None, None]
    assert said.notes == (f"pod p: kvsteer.io/port: cannot be read: {'x' * 40!r}",)


def test_pod_words_read_active_ports_of_the_newer_annotation() -> None:
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
def test_pod_words_read_values(read: Callable[[str], object], text: str, expected: object) -> None:
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
def test_pod_words_refuse_values_of_another_kind(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(ValueError, match=r"^$"):
        read(text)


NONSENSE = [b"", b"[]", b"1", b'{"metadata": 1}', b"[" * 5000, b'{"type": 1}', b"\xff"]


def raw(thing: Any) -> msgspec.Raw:
    return msgspec.Raw(json.dumps(thing).encode())


def test_read_listing_reads_a_page() -> None:
    page = read_listing(
        b'{"metadata": {"resourceVersion": "7", "continue": "x"}, "items": [{}, 1]}'
    )
    assert page is not None
    assert (page.metadata.resource_version, page.metadata.continues) == ("7", "x")
    assert [bytes(one) for one in page.items or ()] == [b"{}", b"1"]


def test_read_event_reads_an_event() -> None:
    event = read_event(b'{"type": "ADDED", "object": {"metadata": {"resourceVersion": "9"}}}')
    assert event is not None
    assert (event.type, read_version(event.object)) == ("ADDED", "9")


@pytest.mark.parametrize("body", NONSENSE)
def test_readers_refuse_malformed_bodies(body: bytes) -> None:
    assert read_listing(body) is None
    assert read_event(body) is None
    assert read_thing(msgspec.Raw(body), Pod) is None
    assert read_version(msgspec.Raw(body)) == ""
    assert read_refusal(body) == RefusalStatus()


def test_read_listing_refuses_a_page_of_commas_undecoded() -> None:
    items = b",".join([b'{"metadata":{}}'] * ((32 << 20) // 16))
    page = b'{"metadata": {"resourceVersion": "1"}, "items": [' + items + b"]}"
    began = time.thread_time()
    assert len(msgspec.json.decode(items.join((b"[", b"]")), type=list[msgspec.Raw])) > PAGE
    decoding = time.thread_time() - began
    began = time.thread_time()
    assert read_listing(page) is None
    assert time.thread_time() - began < decoding / 2


def test_read_listing_refuses_more_objects_than_requested() -> None:
    for count in (PAGE, PAGE + 1):
        page = {"metadata": {"resourceVersion": "1"}, "items": [{}] * count}
        assert (read_listing(msgspec.json.encode(page)) is None) is (count > PAGE)


def test_read_thing_reads_a_pod() -> None:
    pod = read_thing(
        raw({"metadata": {"uid": "u", "labels": None}, "status": {"podIP": "10.0.0.1", "x": 1}}),
        Pod,
    )
    assert pod is not None
    assert (pod.status.pod_ip, pod.metadata.labels) == ("10.0.0.1", None)


def test_read_thing_reads_a_pool() -> None:
    spec = {"selector": {"matchLabels": {"a": "b"}}, "targetPorts": [{"number": 1}]}
    pool = read_thing(raw({"metadata": {"uid": "u"}, "spec": spec}), Pool)
    assert pool is not None
    assert (pool.spec.selector.match_labels, pool.spec.target_ports[0].number) == ({"a": "b"}, 1)


def test_read_thing_refuses_an_object_without_an_identity() -> None:
    assert read_thing(raw({"metadata": {}}), Pod) is None


def test_read_refusal_reads_its_reason() -> None:
    assert read_refusal(b'{"code": 410, "reason": "Expired"}') == RefusalStatus(410, "Expired", "")


@pytest.mark.parametrize(
    ("label", "value", "role"),
    [
        ("llm-d.ai/role", "prefill", "prefill"),
        ("llm-d.ai/role", "decode", "decode"),
        ("llm-d.ai/role", "prefill-decode", "both"),
        ("llm-d.ai/role", "encode-prefill", "prefill"),
        ("role-name", "prefill", "prefill"),
        ("role-name", "decode", "decode"),
    ],
)
def test_role_of_a_pod_is_read_from_foreign_labels(label: str, value: str, role: str) -> None:
    assert only(pod(labels={label: value})).worker.role == role


def test_role_annotation_precedes_labels_and_the_configuration() -> None:
    labels = {"llm-d.ai/role": "decode", "role-name": "prefill"}
    said = {"kvsteer.io/role": "both", "kvsteer.io/transfer-port": "7777"}
    worker = only(pod(labels=labels, annotations=said)).worker
    assert (worker.role, worker.transfer_port) == ("both", 7777)
    assert only(pod(labels=labels)).worker.role == "decode"
    of_all = FoundWorker(model="a", role="prefill")
    assert only(pod(), of_all=of_all).worker.role == "prefill"


@given(st.integers(65_520, 65_535), st.integers(1, 8))
def test_transfer_ports_of_a_pod_are_ports_or_none(transfer_port: int, engines: int) -> None:
    said = {
        "kvsteer.io/transfer-port": str(transfer_port),
        "kvsteer.io/port": ",".join(str(8_000 + number) for number in range(engines)),
    }
    workers, _ = found(pod(annotations=said))
    ports = [one.worker.transfer_port for one in workers]
    wanted = [transfer_port + number for number in range(engines)]
    assert ports == [port if port <= 65_535 else None for port in wanted]


def test_encode_only_pod_gets_no_requests() -> None:
    assert only(pod(labels={"llm-d.ai/role": "encode"})).excluded == "it encodes media for others"


def test_invalid_role_is_noted() -> None:
    one, note = noted(pod(labels={"llm-d.ai/role": "dekode"}))
    assert (one.worker.role, note) == ("both", "pod p: llm-d.ai/role: cannot be read: 'dekode'")
