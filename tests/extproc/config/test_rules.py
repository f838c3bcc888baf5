from dataclasses import replace

import pytest

from extproc.config import rules
from extproc.config.reader import parse
from extproc.config.rules import (
    event_ports_faults,
    fleet_faults,
    listener_faults,
    shared_endpoints,
    shared_feeds,
    worker_faults,
)
from extproc.config.schema import (
    Admin,
    Config,
    Discovery,
    DnsName,
    Envoy,
    EventPorts,
    ExtProc,
    FoundWorker,
    Kubernetes,
    Metrics,
    Model,
    Tls,
    Worker,
    WorkerEvents,
)
from extproc.config.sections import Disaggregation, Recorder, Report, Routers, RouterTls
from extproc.errors import ConfigError

WORKER = 'workers: [{endpoint: "a:1"}]'
MODEL = "models: [{name: m}]"
MIRROR = "disaggregation: {mode: mirror, connector: sglang}"


def told(*sections: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse("\n".join(sections), "c")
    return [fault.removeprefix("c: ") for fault in caught.value.faults]


def with_events(rest: str) -> str:
    return f'workers: [{{endpoint: "a:1", events: {{{rest}}}}}]'


@pytest.mark.parametrize(
    ("sections", "fault"),
    [
        ([WORKER], "models: at least one is needed"),
        ([MODEL], "workers: at least one is needed"),
        (
            [MODEL, WORKER, "extproc: {deadline_ms: 500}"],
            "extproc.deadline_ms: must be below envoy.message_timeout_ms (500)",
        ),
        (
            [MODEL, WORKER, "extproc: {max_body_bytes: 40000000}"],
            (
                "extproc.max_body_bytes: must not be above envoy.request_body_buffer_limit_bytes"
                " (33554432): Envoy answers 413 there"
            ),
        ),
        (
            [MODEL, WORKER, "admin: {listen: '127.0.0.1:9091'}"],
            "metrics.listen: 127.0.0.1:9091 is taken: admin.listen is 127.0.0.1:9091",
        ),
        (
            [MODEL, WORKER, "policy: {shed: true}"],
            "policy.max_in_flight: missing: policy.shed needs it",
        ),
        (
            [MODEL, WORKER, "policy: {shed: true, max_in_flight: 0}"],
            "policy.max_in_flight: must be at least 1, is 0",
        ),
        (
            [MODEL, WORKER, "policy: {rank_header: 'a b'}"],
            "policy.rank_header: is not a valid header name: 'a b'",
        ),
        (
            [MODEL, WORKER, "policy: {rank_header: Content-Length}"],
            "policy.rank_header: 'Content-Length' is a reserved header",
        ),
        (
            [MODEL, WORKER, "policy: {session_header: X-Who, header: x-who}"],
            "policy.session_header: 'X-Who' is already used as policy.header",
        ),
        (
            [MODEL, WORKER, "policy: {rank_header: X-Rank, header: x-rank}"],
            "policy.rank_header: 'X-Rank' is already used as policy.header",
        ),
        (
            [MODEL, WORKER, "steering: {header: 'a b'}"],
            "steering.header: is not a valid header name: 'a b'",
        ),
        (
            [MODEL, WORKER, MIRROR, "steering: {percent: 99}"],
            (
                "steering.percent: must be 100: SGLang's decode workers answer nothing that only"
                " the proxy sends them"
            ),
        ),
        (["models: [{name: m, lora: [m]}]", WORKER], "models[0]: the name 'm' is used 2 times"),
        (
            ["models: [{name: m, chat_template: /nowhere}]", WORKER],
            "models[0].chat_template: no such file: /nowhere",
        ),
        (
            [MODEL, with_events("drain: 'http://a:1', bind: true")],
            "workers[0].events.bind: needs zmq",
        ),
        (
            [MODEL, WORKER, "disaggregation: {mode: mirror}"],
            (
                "disaggregation.connector: nixl needs mode header: its second request says what the"
                " first one answered"
            ),
        ),
        (
            [MODEL, WORKER, "disaggregation: {min_pulled_tokens: 64}"],
            "disaggregation.min_pulled_tokens: needs disaggregation.connector: offloading",
        ),
        (
            [
                *(MODEL, WORKER, "extproc: {dialect: epp}"),
                "disaggregation: {min_pulled_tokens: 64, connector: offloading}",
            ],
            (
                "disaggregation.min_pulled_tokens: needs bodies that can be changed (dialect"
                " buffered), or a sidecar (disaggregation.mode: header)"
            ),
        ),
        (
            [MODEL, WORKER, MIRROR, "extproc: {dialect: epp}"],
            "disaggregation.mode: mirror needs bodies that can be changed: dialect buffered",
        ),
    ],
)
def test_each_rule_is_told_of_a_text(sections: list[str], fault: str) -> None:
    assert told(*sections) == [fault]


def test_what_breaks_no_rule_is_taken() -> None:
    listen = (
        "extproc: {listen: 'unix:/tmp/x'}\nenvoy: {router: 'unix:/tmp/x', listen: 'localhost:1'}"
    )
    workers = with_events("zmq: 'tcp://a:5557', replay: 'tcp://b:5557', ranks: 2")
    config = parse("\n".join([MODEL, workers, listen]), "c")
    assert config.envoy.router == "unix:/tmp/x"
    assert parse("\n".join([MODEL, WORKER, MIRROR]), "c").disaggregation.mode == "mirror"


ONE = Config(models=(Model("m"),))
TWO = Config(models=(Model("m"), Model("n")))


def of_worker(config: Config = ONE, **worker: object) -> list[str]:
    one = Worker(**{"endpoint": "10.0.0.1:1", **worker})  # type: ignore[arg-type]
    return list(worker_faults("workers", [one], config))


def found(discovery: Discovery, config: Config = ONE) -> list[str]:
    return list(fleet_faults(Config(models=config.models, discovery=discovery)))


def of_events(**keys: object) -> list[str]:
    return [
        fault.removeprefix("workers[0].events")
        for fault in of_worker(events=WorkerEvents(**keys))  # type: ignore[arg-type]
    ]


def test_workers_are_listed_or_found() -> None:
    assert found(Discovery()) == ["workers: at least one is needed"]
    assert found(Discovery(file="x")) == []
    assert list(fleet_faults(Config(models=ONE.models, workers=(Worker("a:1"),)))) == []


def test_an_endpoint_is_an_address_given_once() -> None:
    assert of_worker(endpoint="x") == ["workers[0].endpoint: must be host:port, is 'x'"]
    twice = [Worker("a:1"), Worker("a:1")]
    assert list(worker_faults("w", twice, ONE)) == ["w: the endpoint a:1 is given 2 times"]


def test_a_worker_cannot_be_at_port_0() -> None:
    for key, bad in (("zmq", "tcp://a:0"), ("grpc", "a:0"), ("drain", "http://a:0")):
        assert of_events(**{key: bad}) == [f".{key}: must have a port above 0, is {bad!r}"]
    assert of_worker(endpoint="a:0") == ["workers[0].endpoint: must have a port above 0, is 'a:0'"]


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "[::]"])  # noqa: S104 - text
def test_a_worker_is_at_an_address_that_can_be_connected_to(host: str) -> None:
    told = f"is where a server listens; write the worker's own host instead of {host.strip('[]')}"
    for key, bad in (
        ("zmq", f"tcp://{host}:5557"),
        ("grpc", f"{host}:1"),
        ("drain", f"http://{host}:1"),
    ):
        assert of_events(**{key: bad}) == [f".{key}: {bad!r} {told}"]
    both = {"zmq": "tcp://a:1", "replay": f"tcp://{host}:2"}
    assert of_events(**both) == [f".replay: {both['replay']!r} {told}"]
    assert of_worker(endpoint=f"{host}:1") == [f"workers[0].endpoint: '{host}:1' {told}"]
    assert of_events(zmq=f"tcp://{host}:5557", bind=True) == []


def test_two_workers_cannot_have_one_feed() -> None:
    one = WorkerEvents("tcp://a:5557")
    assert list(
        worker_faults("w", [Worker("a:1", events=one), Worker("a:2", events=one)], ONE)
    ) == ["w[1].events.zmq: a:5557 is already used by w[0]"]


def test_a_worker_names_its_model_unless_it_is_the_only_one_or_is_learned() -> None:
    assert of_worker(TWO) == ["workers[0].model: missing; there are 2 models: m, n"]
    assert of_worker(TWO, learn=True) == []
    assert of_worker(ONE) == []
    assert of_worker(model="x") == ["workers[0].model: 'x' is not under models"]


def test_a_feed_has_one_kind_of_source() -> None:
    assert of_events() == [": needs exactly one of zmq, grpc and drain"]
    assert of_events(zmq="tcp://a:1", grpc="a:1") == [": needs exactly one of zmq, grpc and drain"]
    assert of_events(grpc="a") == [".grpc: must be host:port, is 'a'"]
    assert of_events(drain="a:1") == [".drain: must be http://host:port, is 'a:1'"]
    assert of_events(grpc="a:1", replay="tcp://a:1") == [".replay: needs zmq"]
    assert of_events(grpc="a:1", bind=True) == [".bind: needs zmq"]


def test_the_ports_of_ranks_are_ports_and_do_not_overlap() -> None:
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
def test_the_ports_of_workers_that_are_found_make_sense(ports: EventPorts, fault: str) -> None:
    assert list(event_ports_faults("e", ports)) == [fault]
    assert found(Discovery(dns=(DnsName("a", worker=FoundWorker(events=ports)),))) == [
        fault.replace("e", "discovery.dns[0].worker.events", 1)
    ]


def test_a_name_to_look_up_has_a_sound_server_and_port_and_comes_once() -> None:
    bad = DnsName("a", nameserver="dns:53", worker=FoundWorker(port=70000))
    assert found(Discovery(dns=(bad, DnsName("a")))) == [
        "discovery.dns: the name a is given 2 times",
        "discovery.dns[0].nameserver: must be ip:port, is 'dns:53'",
        "discovery.dns[0].worker.port: is above 65535",
    ]
    assert found(Discovery(dns=(DnsName("a", nameserver="127.0.0.1:53"),))) == []


def test_pods_are_selected_in_one_way() -> None:
    needed = ["discovery.kubernetes: needs exactly one of selector and inference_pool"]
    assert found(Discovery(kubernetes=Kubernetes())) == needed
    assert found(Discovery(kubernetes=Kubernetes(selector="a", inference_pool="b"))) == needed
    assert found(Discovery(kubernetes=Kubernetes(selector="a"))) == []


def test_workers_that_are_found_may_learn_their_model() -> None:
    learns, does_not = FoundWorker(), FoundWorker(learn=False)
    assert found(Discovery(kubernetes=Kubernetes(selector="a", worker=learns)), TWO) == []
    assert found(Discovery(kubernetes=Kubernetes(selector="a", worker=does_not)), TWO) == [
        "discovery.kubernetes.worker.model: missing; there are 2 models: m, n"
    ]


PLAIN = Config()
MUTUAL = Tls(certificate="c", key="k", client_ca="a")


def of_listeners(**sections: object) -> list[str]:
    return list(listener_faults(replace(PLAIN, **sections)))  # type: ignore[arg-type]


def test_what_nobody_wrote_is_sound() -> None:
    assert of_listeners() == []


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (ExtProc("x"), "extproc.listen: must be host:port, is 'x'"),
        (ExtProc("unix:"), "extproc.listen: unix: needs a path"),
        (ExtProc("unix://"), "extproc.listen: unix: needs a path"),
        (
            ExtProc("/run/x.sock"),
            (
                "extproc.listen: must be host:port or unix:PATH, is '/run/x.sock'; did you mean"
                " unix:/run/x.sock?"
            ),
        ),
        (
            ExtProc(socket_mode="rw"),
            "extproc.socket_mode: must be a mode such as \"0660\", is 'rw'",
        ),
        (
            ExtProc("unix:/x", tls=MUTUAL),
            "extproc.tls: needs a listen of host:port; for a Unix socket set extproc.socket_mode",
        ),
        (
            ExtProc("unix:/" + 107 * "x"),
            "extproc.listen: the socket's path has 108 bytes; 107 are the most",
        ),
    ],
)
def test_the_routers_own_listener_is_sound(options: ExtProc, fault: str) -> None:
    assert of_listeners(extproc=options) == [fault]


@pytest.mark.parametrize(
    ("listen", "fault"),
    [
        (
            "127.0.0.1:65530",
            "extproc.listen: has no port for process 1: 65540 is above 65535",
        ),
        (
            "unix:/" + 106 * "x",
            "extproc.listen: the socket's path has 109 bytes; 107 are the most",
        ),
    ],
)
def test_every_process_has_an_address_of_its_own(listen: str, fault: str) -> None:
    assert of_listeners(extproc=ExtProc(listen, processes=2)) == [fault]


def test_processes_do_not_take_each_others_ports() -> None:
    two = ExtProc(processes=2)
    (fault,) = of_listeners(
        extproc=two, admin=Admin("127.0.0.1:9100"), metrics=Metrics("127.0.0.1:9110")
    )
    assert "admin.listen of process 1" in fault


@pytest.mark.parametrize("key", ["drain", "bind"])
def test_what_one_reader_empties_or_binds_is_not_for_several_processes(key: str) -> None:
    alone = {
        "drain": WorkerEvents(drain="http://a:1"),
        "bind": WorkerEvents(zmq="tcp://*:1", bind=True),
    }
    workers = [
        Worker("a:1", events=alone[key]),
        Worker("b:1", events=WorkerEvents(zmq="tcp://b:2")),
    ]
    (fault,) = of_listeners(extproc=ExtProc(processes=2), workers=workers)
    assert fault.startswith(f"workers[0].events.{key}: cannot be shared by 2 processes")


def test_the_longest_path_of_a_socket_is_taken() -> None:
    assert of_listeners(extproc=ExtProc("unix:///" + 106 * "x")) == []


def test_envoy_listens_on_an_ip_address() -> None:
    said = "must be ip:port, since Envoy listens on no host name, is 'name:1'"
    assert of_listeners(envoy=Envoy(listen="name:1")) == [f"envoy.listen: {said}"]
    assert of_listeners(envoy=Envoy(listen="localhost:1", router="unix:x")) == []


def test_a_client_certificate_that_is_asked_for_is_given() -> None:
    said = "envoy.router_tls: needs certificate and key: extproc.tls.client_ca asks for them"
    asks = ExtProc(tls=MUTUAL)
    assert of_listeners(extproc=asks, envoy=Envoy(router_tls=RouterTls("ca"))) == [said]
    given = RouterTls("ca", certificate="c", key="k")
    assert of_listeners(extproc=asks, envoy=Envoy(router_tls=given)) == []
    assert of_listeners(extproc=asks) == []  # of another configuration of Envoy's nothing is known
    anybody = ExtProc(tls=replace(MUTUAL, client_ca=None))
    assert of_listeners(extproc=anybody, envoy=Envoy(router_tls=RouterTls("ca"))) == []
    half = Envoy(router_tls=RouterTls("ca", certificate="c"))
    assert of_listeners(envoy=half) == ["envoy.router_tls: certificate and key belong together"]


@pytest.mark.parametrize("other", ["127.0.0.1:9091", "localhost:9091", "0.0.0.0:9091"])
def test_an_address_is_given_away_once(other: str) -> None:
    said = f"metrics.listen: 127.0.0.1:9091 is taken: admin.listen is {other}"
    assert of_listeners(admin=Admin(other)) == [said]


@pytest.mark.parametrize("other", ["[::]:9091", "127.0.0.2:9091", "a:9091", "127.0.0.1:9092"])
def test_another_address_is_free(other: str) -> None:
    assert of_listeners(admin=Admin(other)) == []


def test_any_port_is_taken_twice() -> None:
    assert of_listeners(admin=Admin("127.0.0.1:0"), metrics=Metrics("127.0.0.1:0")) == []


def test_envoys_addresses_are_held_against_the_routers_on_one_host() -> None:
    same = Envoy(listen="127.0.0.1:9091", admin="127.0.0.1:9091")
    assert of_listeners(envoy=same) == [
        "envoy.admin: 127.0.0.1:9091 is taken: envoy.listen is 127.0.0.1:9091",
        "envoy.listen: 127.0.0.1:9091 is taken: metrics.listen is 127.0.0.1:9091",
        "envoy.admin: 127.0.0.1:9091 is taken: metrics.listen is 127.0.0.1:9091",
    ]
    elsewhere = Envoy(listen="0.0.0.0:9091", router="router:9002")
    assert of_listeners(envoy=elsewhere) == []


@pytest.mark.parametrize(
    ("routers", "said"),
    [
        (Routers(("a:1", "b:1"), "standby"), []),
        (Routers(("unix:/a", "a:1"), "conversation"), []),
        (Routers(()), ["envoy.routers.addresses: needs at least one"]),
        (Routers(("a", "a:1")), ["envoy.routers.addresses[0]: must be host:port, is 'a'"]),
        (Routers(("a:1", "a:1")), ["envoy.routers.addresses: a:1 is given twice"]),
        (
            Routers(("a:1",), "standby"),
            ["envoy.routers.choice: standby needs two addresses or more, in their order"],
        ),
        (
            Routers(("a:1",), "conversation", ()),
            ["envoy.routers.conversation_headers: choice conversation needs at least one"],
        ),
        (
            Routers(("a:1",), "conversation", ("x-id", "a b")),
            ["envoy.routers.conversation_headers: 'a b' is no header's name"],
        ),
    ],
)
def test_faults_of_several_routers_are_told(routers: Routers, said: list[str]) -> None:
    assert of_listeners(envoy=Envoy(routers=routers)) == said


def test_one_router_and_several_are_not_both_meant() -> None:
    envoy = Envoy(router="a:1", routers=Routers(("b:1",)))
    assert of_listeners(envoy=envoy) == [
        "envoy.routers: stands instead of envoy.router: remove one of the two"
    ]


def test_a_port_that_no_process_of_a_router_can_have_is_told() -> None:
    found = of_listeners(
        envoy=Envoy(routers=Routers(("a:65530", "b:1"))), extproc=ExtProc(processes=2)
    )
    (fault,) = found
    assert fault.startswith("envoy.routers.addresses[0]: has no port for process 1")


def test_what_nobody_wrote_of_envoy_is_not_held_against_the_router() -> None:
    assert of_listeners(admin=Admin("127.0.0.1:10000")) == []


def test_a_wrong_address_is_told_once() -> None:
    assert of_listeners(admin=Admin("x"), envoy=Envoy(router="y")) == [
        "admin.listen: must be host:port, is 'x'",
        "envoy.router: must be host:port, is 'y'",
    ]


def clashes(*events: WorkerEvents) -> list[str]:
    workers = [Worker(f"a:{port}", events=one) for port, one in enumerate(events, 1)]
    return list(shared_feeds("w", workers))


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ("a:1", "a:1", "w: the endpoint a:1 is given 2 times"),
        ("x", "x", "w: the endpoint x is given 2 times"),
        ("localhost:1", "127.0.0.1:1", "w: the endpoints localhost:1 and 127.0.0.1:1 are the same"),
        ("a:1", "A:1", "w: the endpoints a:1 and A:1 are the same"),
        ("[0::1]:1", "[::1]:1", "w: the endpoints [0::1]:1 and [::1]:1 are the same"),
    ],
)
def test_an_endpoint_is_one_workers(one: str, other: str, said: str) -> None:
    assert list(shared_endpoints("w", [Worker(one), Worker("b:1"), Worker(other)])) == [said]


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
def test_a_feed_is_one_workers(events: WorkerEvents, said: str) -> None:
    assert clashes(events, events) == [f"w[1].events.{said} is already used by w[0]"]


def test_ranks_that_overlap_are_told_once_a_worker_and_key() -> None:
    first = WorkerEvents("tcp://a:5557", "tcp://a:5657", ranks=4)
    second = WorkerEvents("tcp://a:5559", "tcp://a:5657", ranks=4)
    assert clashes(first, second) == [
        "w[1].events.zmq: a:5559 is already used by w[0]",
        "w[1].events.replay: a:5657 is already used by w[0]",
    ]


def test_feeds_that_differ_are_sound() -> None:
    assert clashes(WorkerEvents("tcp://a:1", ranks=2), WorkerEvents("tcp://a:3", ranks=2)) == []
    assert clashes(WorkerEvents("tcp://a:1"), WorkerEvents("tcp://b:1")) == []
    assert clashes(WorkerEvents("tcp://a:1", topic="x"), WorkerEvents("tcp://a:1", topic="y")) == []
    assert clashes(WorkerEvents(grpc="a:1"), WorkerEvents(grpc="a:1", service="sglang")) == []


def test_what_is_bound_is_one_workers_whatever_its_topic() -> None:
    bound = [WorkerEvents("tcp://a:1", topic=topic, bind=True) for topic in "xy"]
    assert clashes(*bound) == ["w[1].events.zmq: a:1 is already used by w[0]"]


def test_what_is_no_feed_or_no_address_is_left_to_others() -> None:
    wrong = WorkerEvents("a:1", ranks=2)
    workers = [
        Worker("a:1", events="auto"),
        Worker("a:2", events=wrong),
        Worker("a:3", events=wrong),
    ]
    assert list(shared_feeds("w", workers)) == []
    assert clashes(WorkerEvents("tcp://a:65535", ranks=3)) == []


def doubts(config: Config, *there: str) -> list[str]:
    return rules.doubts(config, lambda name: name in there)


LISTED = Config(models=(Model("m"),), workers=(Worker("a:1"),))
WITH_ADAPTERS = Config(models=(Model("m", lora=("a",)), Model("n", lora=("b",))))


def test_a_model_is_served_where_all_workers_are_listed_and_name_theirs() -> None:
    named, learning = Worker("a:1", "m"), Worker("a:2", learn=True)
    alone = replace(WITH_ADAPTERS, workers=(named,))
    assert doubts(alone) == ["models[1]: no worker serves 'n'"]
    assert doubts(replace(WITH_ADAPTERS, workers=(named, Worker("a:2", "n")))) == []
    assert doubts(replace(WITH_ADAPTERS, workers=(named, learning))) == []
    assert doubts(replace(alone, discovery=Discovery(file="x")), "x") == []
    assert doubts(Config(models=(Model("m"),), workers=(Worker("a:1"),))) == []


def test_adapters_of_a_worker_are_some_models() -> None:
    unknown = "lora: 'x' is under no model's lora"
    workers = (Worker("a:1", "m", lora=("a", "x")), Worker("a:2", "n", lora=()))
    assert doubts(replace(WITH_ADAPTERS, workers=workers)) == [f"workers[0].{unknown}"]
    found = FoundWorker(lora=("b", "x"))
    pods, names = Kubernetes(selector="a", worker=found), (DnsName("a", worker=found),)
    assert doubts(replace(WITH_ADAPTERS, discovery=Discovery(dns=names, kubernetes=pods))) == [
        f"discovery.dns[0].worker.{unknown}",
        f"discovery.kubernetes.worker.{unknown}",
    ]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "[::1]", "localhost"])
def test_servers_for_the_operator_are_on_loopback(host: str) -> None:
    envoy = Envoy(admin=f"{host}:9901")
    assert doubts(replace(LISTED, admin=Admin(f"{host}:9090"), envoy=envoy)) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1", "router.example"])  # noqa: S104 - text
def test_servers_for_the_operator_that_others_reach_are_doubted(host: str) -> None:
    admin, envoys = doubts(
        replace(LISTED, admin=Admin(f"{host}:9090"), envoy=Envoy(admin=f"{host}:9901"))
    )
    assert admin.startswith(f"admin.listen: anybody who reaches {host}:9090 can drain workers")
    assert envoys.startswith(f"envoy.admin: anybody who reaches {host}:9901 can stop Envoy")


def test_files_that_are_not_there_yet_are_doubted() -> None:
    config = replace(LISTED, discovery=Discovery(file="/w"), envoy=Envoy(eds_directory="/d"))
    assert [one.partition(":")[0] for one in doubts(config)] == [
        "discovery.file",
        "envoy.eds_directory",
    ]
    assert doubts(config, "/w", "/d") == []


def test_a_report_without_a_folder_is_doubted() -> None:
    config = replace(LISTED, report=Report("/away/report"))
    assert doubts(config) == [
        "report.file: no folder for /away/report: until there is one, the report is not kept"
    ]
    assert doubts(config, "/away") == []
    assert doubts(replace(LISTED, report=Report("report")), ".") == []


def test_a_recording_without_a_folder_is_doubted() -> None:
    config = replace(LISTED, recorder=Recorder("/away/trace"))
    (told,) = doubts(config)
    assert told.startswith("recorder.file: no folder for /away/trace")
    assert doubts(config, "/away") == []


def of_roles(mode: str | None, connector: str, *roles: str) -> str:
    """What is doubted of workers with these roles."""
    workers = tuple(Worker(f"a:{port}", role=role) for port, role in enumerate(roles, 1))
    return " ".join(
        doubts(replace(ONE, workers=workers, disaggregation=Disaggregation(mode, connector)))
    )


def test_roles_that_leave_requests_unanswered_are_doubted() -> None:
    assert of_roles(None, "nixl", "both", "prefill").startswith("disaggregation.mode: missing")
    assert of_roles("header", "nixl", "decode").endswith("has the role prefill: nothing is split")
    assert of_roles("header", "nixl", "decode", "prefill") == ""
    assert "none takes whole requests" in of_roles("mirror", "sglang", "decode", "prefill")
    assert of_roles("mirror", "sglang", "decode", "prefill", "both") == ""
    found = replace(ONE, discovery=Discovery(dns=(DnsName("a"),)))
    assert doubts(replace(found, disaggregation=Disaggregation("header"))) == []


@pytest.mark.parametrize(
    ("sharing", "fault"),
    [
        ("url: here", "sharing.url: must be valkey://host:port, "),
        (f"url: directory:/{'x' * 80}", "sharing.url: the path has 81 bytes; 75 are the most"),
        (f"url: unix:///{'x' * 110}", "sharing.url: the path has 111 bytes; 107 are the most"),
        ("url: redis://a, name: a b", "sharing.name: must be 1 to 64 printable"),
        ('url: redis://a, channel: ""', "sharing.channel: must not be empty"),
        ("url: redis://a, ca: f", "sharing.ca: needs a url of valkeys:// or rediss://"),
        ("url: redis://a, username: u", "sharing.username: needs password_file"),
        ("url: directory:/a, password_file: f", "sharing: username and password_file are for an"),
        ("url: redis://a, tick_ms: 0", "sharing.tick_ms: must be at least 1"),
    ],
)
def test_what_cannot_be_shared_is_a_fault(sharing: str, fault: str) -> None:
    (found,) = told(MODEL, WORKER, f"sharing: {{{sharing}}}")
    assert found.startswith(fault)


def test_a_fleet_that_anybody_could_tell_anything_is_doubted() -> None:
    def doubts(sharing: str) -> list[str]:
        config = parse(f"{MODEL}\n{WORKER}\nsharing: {{{sharing}}}", "c")
        return [one for one in rules.doubts(config, lambda _: True) if "sharing" in one]

    (doubt,) = doubts("url: redis://a")
    assert doubt.startswith("sharing.secret_file: without it")
    assert not doubts("url: redis://a, secret_file: f")
    assert not doubts("url: redis://a, password_file: f")
    assert not doubts("url: directory:/a")


def test_bodies_are_changed_for_a_mirror_and_for_pulls_without_a_sidecar() -> None:
    pulls = Disaggregation(connector="offloading", min_pulled_tokens=64)
    assert Disaggregation("mirror").changes_bodies
    assert pulls.changes_bodies
    assert not replace(pulls, mode="header").changes_bodies
    assert not Disaggregation().changes_bodies
