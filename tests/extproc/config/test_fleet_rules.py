import pytest

from extproc.config.fleet_rules import (
    event_ports_faults,
    fleet_faults,
    missing_extras,
    shared_endpoints,
    shared_feeds,
    worker_faults,
)
from extproc.config.reader import parse
from extproc.config.schema import (
    Config,
    DiscoverySettings,
    DnsName,
    EventPorts,
    FoundWorker,
    Kubernetes,
    Model,
    WorkerEngine,
    WorkerEvents,
    WorkerSettings,
)

ONE = Config(models=(Model("m"),))
TWO = Config(models=(Model("m"), Model("n")))


def of_worker(config: Config = ONE, **worker: object) -> list[str]:
    one = WorkerSettings(**{"endpoint": "10.0.0.1:1", **worker})  # type: ignore[arg-type]
    return list(worker_faults("workers", [one], config))


def found(discovery: DiscoverySettings, config: Config = ONE) -> list[str]:
    return list(fleet_faults(Config(models=config.models, discovery=discovery)))


def of_events(**keys: object) -> list[str]:
    return [
        fault.removeprefix("workers[0].events")
        for fault in of_worker(events=WorkerEvents(**keys))  # type: ignore[arg-type]
    ]


def test_workers_must_be_listed_or_discovered() -> None:
    assert found(DiscoverySettings()) == ["workers: at least one is needed"]
    assert found(DiscoverySettings(file="x")) == []
    assert list(fleet_faults(Config(models=ONE.models, workers=(WorkerSettings("a:1"),)))) == []


def test_endpoint_must_be_an_address_given_once() -> None:
    assert of_worker(endpoint="x") == ["workers[0].endpoint: must be host:port, is 'x'"]
    twice = [WorkerSettings("a:1"), WorkerSettings("a:1")]
    assert list(worker_faults("w", twice, ONE)) == [
        "w[1].endpoint: a:1 is the endpoint of w[0] too"
    ]


def test_endpoint_port_must_not_be_0() -> None:
    for key, bad in (("zmq", "tcp://a:0"), ("grpc", "a:0"), ("drain", "http://a:0")):
        assert of_events(**{key: bad}) == [f".{key}: must have a port above 0, is {bad!r}"]
    assert of_worker(endpoint="a:0") == ["workers[0].endpoint: must have a port above 0, is 'a:0'"]


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]"])
def test_endpoint_host_must_be_connectable(host: str) -> None:
    listed = f"is where a server listens; write the worker's own host instead of {host.strip('[]')}"
    for key, bad in (
        ("zmq", f"tcp://{host}:5557"),
        ("grpc", f"{host}:1"),
        ("drain", f"http://{host}:1"),
    ):
        assert of_events(**{key: bad}) == [f".{key}: {bad!r} {listed}"]
    both = {"zmq": "tcp://a:1", "replay": f"tcp://{host}:2"}
    assert of_events(**both) == [f".replay: {both['replay']!r} {listed}"]
    assert of_worker(endpoint=f"{host}:1") == [f"workers[0].endpoint: '{host}:1' {listed}"]
    assert of_events(zmq=f"tcp://{host}:5557", bind=True) == []


def test_feed_of_two_workers_is_a_fault() -> None:
    one = WorkerEvents("tcp://a:5557")
    assert list(
        worker_faults(
            "w", [WorkerSettings("a:1", events=one), WorkerSettings("a:2", events=one)], ONE
        )
    ) == ["w[1].events.zmq: a:5557 is already used by w[0]"]


def test_worker_needs_a_model_unless_it_is_the_only_one_or_learned() -> None:
    assert of_worker(TWO) == ["workers[0].model: missing; there are 2 models: m, n"]
    assert of_worker(TWO, learn=True) == []
    assert of_worker(ONE) == []
    assert of_worker(model="x") == ["workers[0].model: 'x' is not under models"]


def test_version_of_an_engine_must_be_a_release() -> None:
    said = "engine.version: must be a release such as 0.32.0, is 'latest'"
    bad = WorkerEngine("vllm", "latest")
    assert of_worker(engine=bad) == [f"workers[0].{said}"]
    assert of_worker(engine=WorkerEngine("vllm", "0.32.0rc1")) == []
    pods = Kubernetes(selector="a=b", worker=FoundWorker(engine=bad))
    assert found(DiscoverySettings(kubernetes=pods)) == [f"discovery.kubernetes.worker.{said}"]


def test_events_need_exactly_one_kind_of_source() -> None:
    assert of_events() == [": needs exactly one of zmq, grpc and drain"]
    assert of_events(zmq="tcp://a:1", grpc="a:1") == [": needs exactly one of zmq, grpc and drain"]
    assert of_events(grpc="a") == [".grpc: must be host:port, is 'a'"]
    assert of_events(drain="a:1") == [".drain: must be http://host:port, is 'a:1'"]
    assert of_events(grpc="a:1", replay="tcp://a:1") == [".replay: needs zmq"]
    assert of_events(grpc="a:1", bind=True) == [".bind: needs zmq"]


def test_rank_ports_must_be_valid_and_not_overlap() -> None:
    assert of_events(zmq="a:1") == [".zmq: must be tcp://host:port, is 'a:1'"]
    assert of_events(zmq="tcp://a:65535", ranks=2) == [".zmq: port 65535 + 2 ranks is above 65535"]
    assert of_events(zmq="tcp://a:1", replay="tcp://a:2", ranks=2) == [
        ": with 2 ranks the ports of zmq and replay overlap (rank r uses both ports + r)"
    ]
    assert of_events(zmq="tcp://a:1", replay="tcp://a:3", ranks=2) == []
    assert of_events(zmq="tcp://a:1", replay="tcp://a:1") == [": zmq and replay have the same port"]
    assert of_events(zmq="tcp://a:1", load="tcp://a:1") == [": zmq and load have the same port"]
    assert of_events(zmq="tcp://a:1", replay="tcp://a:3", load="tcp://a:2", ranks=2) == [
        ": with 2 ranks the ports of zmq and load overlap (rank r uses both ports + r)",
        ": with 2 ranks the ports of replay and load overlap (rank r uses both ports + r)",
    ]
    assert of_events(grpc="a:1", load="tcp://a:2") == [".load: needs zmq"]
    assert of_events(zmq="tcp://a:1", load="tcp://*:2") != []


@pytest.mark.parametrize(
    ("ports", "fault"),
    [
        (EventPorts(), "e: needs exactly one of zmq_port, grpc_port and drain"),
        (EventPorts(1, drain=True), "e: needs exactly one of zmq_port, grpc_port and drain"),
        (EventPorts(grpc_port=1, replay_port=2), "e.replay_port: needs zmq_port"),
        (EventPorts(65535, ranks=2), "e.zmq_port: with its ranks it is above 65535"),
        (EventPorts(grpc_port=70000), "e.grpc_port: with its ranks it is above 65535"),
        (
            EventPorts(5557, 5558, ranks=2),
            "e: with 2 ranks the ports of zmq and replay overlap (rank r uses both ports + r)",
        ),
    ],
)
def test_event_ports_of_discovered_workers_are_checked(ports: EventPorts, fault: str) -> None:
    assert list(event_ports_faults("e", ports)) == [fault]
    assert found(DiscoverySettings(dns=(DnsName("a", worker=FoundWorker(events=ports)),))) == [
        fault.replace("e", "discovery.dns[0].worker.events", 1)
    ]


def test_dns_name_needs_a_valid_server_and_port_and_is_given_once() -> None:
    bad = DnsName("a", nameserver="dns:53", worker=FoundWorker(port=70000))
    assert found(DiscoverySettings(dns=(bad, DnsName("a")))) == [
        "discovery.dns: the name a is given 2 times",
        "discovery.dns[0].nameserver: must be ip:port, is 'dns:53'",
        "discovery.dns[0].worker.port: is above 65535",
    ]
    assert found(DiscoverySettings(dns=(DnsName("a", nameserver="127.0.0.1:53"),))) == []


def test_pods_need_exactly_one_selector_or_pool() -> None:
    needed = ["discovery.kubernetes: needs exactly one of selector and inference_pool"]
    assert found(DiscoverySettings(kubernetes=Kubernetes())) == needed
    assert (
        found(DiscoverySettings(kubernetes=Kubernetes(selector="a", inference_pool="b"))) == needed
    )
    assert found(DiscoverySettings(kubernetes=Kubernetes(selector="a"))) == []


def test_discovered_workers_may_learn_their_model() -> None:
    learns, does_not = FoundWorker(), FoundWorker(learn=False)
    assert found(DiscoverySettings(kubernetes=Kubernetes(selector="a", worker=learns)), TWO) == []
    assert found(DiscoverySettings(kubernetes=Kubernetes(selector="a", worker=does_not)), TWO) == [
        "discovery.kubernetes.worker.model: missing; there are 2 models: m, n"
    ]


def clashes(*events: WorkerEvents) -> list[str]:
    workers = [WorkerSettings(f"a:{port}", events=one) for port, one in enumerate(events, 1)]
    return list(shared_feeds("w", workers))


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ("a:1", "a:1", "a:1 is the endpoint of w[0] too"),
        ("x", "x", "x is the endpoint of w[0] too"),
        ("localhost:1", "127.0.0.1:1", "127.0.0.1:1 is the endpoint of w[0] too, as localhost:1"),
        ("a:1", "A:1", "A:1 is the endpoint of w[0] too, as a:1"),
        ("[0::1]:1", "[::1]:1", "[::1]:1 is the endpoint of w[0] too, as [0::1]:1"),
    ],
)
def test_shared_endpoint_is_a_fault(one: str, other: str, said: str) -> None:
    assert list(
        shared_endpoints("w", [WorkerSettings(one), WorkerSettings("b:1"), WorkerSettings(other)])
    ) == [f"w[2].endpoint: {said}"]


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (WorkerEvents("tcp://a:5557"), "zmq: a:5557"),
        (WorkerEvents("tcp://a:5557", topic="t"), "zmq: a:5557"),
        (WorkerEvents("tcp://a:5557", bind=True), "zmq: a:5557"),
        (WorkerEvents(grpc="localhost:1"), "grpc: localhost:1"),
        (WorkerEvents(drain="http://a:1/"), "drain: a:1"),
    ],
)
def test_shared_feed_is_a_fault(events: WorkerEvents, said: str) -> None:
    assert clashes(events, events) == [f"w[1].events.{said} is already used by w[0]"]


def test_overlapping_ranks_are_named_once_for_each_worker_and_key() -> None:
    first = WorkerEvents("tcp://a:5557", "tcp://a:5657", ranks=4)
    second = WorkerEvents("tcp://a:5559", "tcp://a:5657", ranks=4)
    assert clashes(first, second) == [
        "w[1].events.zmq: a:5559 is already used by w[0]",
        "w[1].events.replay: a:5657 is already used by w[0]",
    ]


def test_different_feeds_are_valid() -> None:
    assert clashes(WorkerEvents("tcp://a:1", ranks=2), WorkerEvents("tcp://a:3", ranks=2)) == []
    assert clashes(WorkerEvents("tcp://a:1"), WorkerEvents("tcp://b:1")) == []
    assert clashes(WorkerEvents("tcp://a:1", topic="x"), WorkerEvents("tcp://a:1", topic="y")) == []
    assert clashes(WorkerEvents(grpc="a:1"), WorkerEvents(grpc="a:1", service="sglang")) == []


def test_bound_feed_is_shared_whatever_its_topic() -> None:
    bound = [WorkerEvents("tcp://a:1", topic=topic, bind=True) for topic in "xy"]
    assert clashes(*bound) == ["w[1].events.zmq: a:1 is already used by w[0]"]


def test_shared_feeds_ignore_malformed_addresses() -> None:
    wrong = WorkerEvents("a:1", ranks=2)
    workers = [
        WorkerSettings("a:1", events="auto"),
        WorkerSettings("a:2", events=wrong),
        WorkerSettings("a:3", events=wrong),
    ]
    assert list(shared_feeds("w", workers)) == []
    assert clashes(WorkerEvents("tcp://a:65535", ranks=3)) == []


@pytest.mark.parametrize(
    ("section", "needed"),
    [
        ("workers: [{endpoint: 'a:1'}, {endpoint: 'a:2', events: auto}]", []),
        ("workers: [{endpoint: 'a:1', events: {zmq: 'tcp://a:2'}}]", []),
        ("workers: [{endpoint: 'a:1', events: {grpc: 'a:2'}}]", ["workers[0].events.grpc"]),
        ("discovery: {dns: [{name: a, worker: {events: {zmq_port: 1}}}]}", []),
        (
            "discovery: {dns: [{name: a}, {name: b, worker: {events: {grpc_port: 1}}}]}",
            ["discovery.dns[1].worker.events.grpc_port"],
        ),
        (
            "discovery: {kubernetes: {selector: a=b, worker: {events: {grpc_port: 1}}}}",
            ["discovery.kubernetes.worker.events.grpc_port", "discovery.kubernetes"],
        ),
        (
            "workers: [{endpoint: 'a:1'}], sharing: {url: 'valkey://a:1'}",
            ["sharing.url"],
        ),
        ("workers: [{endpoint: 'a:1'}], sharing: {url: 'directory:/run/a'}", []),
    ],
)
def test_missing_extras_names_the_keys_that_need_them(section: str, needed: list[str]) -> None:
    config = parse(f"{{models: [{{name: m}}], {section}}}", "c.yaml")
    assert [one.key for one in missing_extras(config, lambda _module: None)] == needed
    assert missing_extras(config, lambda module: module) == []
