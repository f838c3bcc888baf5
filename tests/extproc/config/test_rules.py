from dataclasses import replace
from typing import cast

import pytest

from extproc.base.errors import ConfigError
from extproc.config import rules
from extproc.config.policies import POLICIES, Ranking, by_chance, header_keys
from extproc.config.reader import parse
from extproc.config.rules import (
    listener_faults,
)
from extproc.config.schema import (
    Admin,
    Config,
    DiscoverySettings,
    DnsName,
    Envoy,
    ExtProc,
    FoundWorker,
    Kubernetes,
    MetricsSettings,
    Model,
    Policy,
    Tls,
    WorkerEvents,
    WorkerSettings,
)
from extproc.config.sections import (
    Disaggregation,
    ProbeSettings,
    RecorderSettings,
    ReportSettings,
    Routers,
    RouterTls,
    State,
)
from tests.extproc.config.faults import faults

WORKER = 'workers: [{endpoint: "a:1"}]'
MODEL = "models: [{name: m}]"
QUICK = "extproc: {deadline_ms: 20}"
MIRROR = "disaggregation: {mode: mirror, connector: sglang}"


MISSING = "policy.header: missing; the policy random needs it"
CLASSES = "policy: {classes: {header: %s, default: %s, of: [%s]}}"


def faults_of(*sections: str) -> list[str]:
    return faults("\n".join(sections))


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
                " (33554432): Envoy answers 413 above it"
            ),
        ),
        (
            [MODEL, WORKER, "admin: {listen: '127.0.0.1:9091'}"],
            "metrics.listen: 127.0.0.1:9091 is taken: admin.listen is 127.0.0.1:9091",
        ),
        (
            [MODEL, WORKER, "probe: {token_file: t, listen: '127.0.0.1:9091'}"],
            "probe.listen: 127.0.0.1:9091 is taken: metrics.listen is 127.0.0.1:9091",
        ),
        (
            [MODEL, WORKER, "probe: {token_file: t, listen: here}"],
            "probe.listen: must be host:port, is 'here'",
        ),
        (
            [MODEL, WORKER, "policy: {warm_models: [x]}", QUICK],
            "policy.warm_models[0]: 'x' is the name of no model",
        ),
        (
            ["models: [{name: 'a, b'}]", WORKER, "policy: {warm_models: ['a, b']}", QUICK],
            "policy.warm_models[0]: 'a, b' cannot be a name in a header's list",
        ),
        (
            [MODEL, WORKER, "policy: {shed: true}"],
            "policy.max_in_flight: missing, but policy.shed needs it",
        ),
        (
            [MODEL, WORKER, "policy: {shed: true, max_in_flight: 0}"],
            "policy.max_in_flight: must be at least 1, is 0",
        ),
        (
            [MODEL, WORKER, "policy: {hold: {bound_seconds: 601}}"],
            "policy.hold.bound_seconds: must be at most 600, is 601",
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
            [MODEL, WORKER, "isolation: {header: 'a b', secret_file: f}"],
            "isolation.header: is not a valid header name: 'a b'",
        ),
        (
            [MODEL, WORKER, "isolation: {header: Host, secret_file: f}"],
            "isolation.header: 'Host' is a reserved header",
        ),
        (
            [MODEL, WORKER, "isolation: {header: x, secret_file: f, share: [none]}"],
            "isolation.share[0]: 'none' is the name of no model",
        ),
        (
            [MODEL, WORKER, "isolation: {header: x, secret_file: f}", "extproc: {dialect: epp}"],
            "isolation: needs bodies that can be changed: dialect buffered",
        ),
        (
            [MODEL, WORKER, "recorder: {tenant_header: 'a b'}"],
            "recorder.tenant_header: is not a valid header name: 'a b'",
        ),
        (
            [
                MODEL,
                WORKER,
                "isolation: {header: x, secret_file: f}",
                "recorder: {tenant_header: x}",
            ],
            "recorder.tenant_header: isolation.header names the tenants already",
        ),
        (
            [MODEL, WORKER, CLASSES % ("'a b'", "a", "{name: a}, {name: b}")],
            "policy.classes.header: is not a valid header name: 'a b'",
        ),
        (
            [MODEL, WORKER, CLASSES % ("host", "a", "{name: a}, {name: b}")],
            "policy.classes.header: 'host' is a reserved header",
        ),
        (
            [MODEL, WORKER, CLASSES % ("x", "a", "{name: a}")],
            "policy.classes.of: two classes are the least",
        ),
        (
            [MODEL, WORKER, CLASSES % ("x", "a", "{name: a}, {name: b}, {name: b}")],
            "policy.classes.of: the name 'b' is used 2 times",
        ),
        (
            [MODEL, WORKER, CLASSES % ("x", "c", "{name: a}, {name: b}")],
            "policy.classes.default: 'c' is the name of no class",
        ),
        (
            [MODEL, WORKER, "policy: {hold: {classes: [batch]}}"],
            "policy.hold.classes: 'batch' is the name of no class",
        ),
        (
            [MODEL, WORKER, "policy: {hand_tokens: {enabled: true}}"],
            "policy.hand_tokens.enabled: needs accounting.responses: usage, to compare counts",
        ),
        (
            [MODEL, WORKER, "misses: {enabled: true, response_headers: true}"],
            "misses.response_headers: needs accounting.responses: headers or usage, to change any",
        ),
        (
            [MODEL, WORKER, "accounting: {responses: usage}", "misses: {response_headers: true}"],
            "misses.response_headers: needs misses.enabled: true",
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
            [MODEL, WORKER, "disaggregation: {price_pulls: true}"],
            "disaggregation.min_pulled_tokens: missing, but disaggregation.price_pulls needs it",
        ),
        (
            [MODEL, WORKER, "stores: [{name: s, workers: []}, {name: s, workers: []}]"],
            "stores: the name 's' is used twice",
        ),
        (
            [MODEL, WORKER, "stores: [{name: s}, {name: t, workers: []}]"],
            "stores: with several, each needs a list of its workers",
        ),
        (
            [MODEL, WORKER, 'stores: [{name: s, workers: ["a:1"]}, {name: t, workers: ["a:1"]}]'],
            "stores: 'a:1' mounts more than one store",
        ),
        (
            [MODEL, WORKER, "stores: [{name: s, media: [cpu]}]"],
            "stores[0]: with media or zmq it needs a list of its workers",
        ),
        (
            [MODEL, WORKER, 'stores: [{name: s, workers: ["a:1"], media: [GPU]}]'],
            "stores[0].media: 'GPU' is no medium of a store",
        ),
        (
            [MODEL, WORKER, 'stores: [{name: s, workers: ["a:1"], media: [tape]}]'],
            "stores[0].media: 'tape' is no medium of a store",
        ),
        (
            [MODEL, WORKER, 'stores: [{name: s, workers: ["a:1"], zmq: "tcp://*:5557"}]'],
            (
                "stores[0].zmq: 'tcp://*:5557' is where a server listens; write the worker's own"
                " host instead of *"
            ),
        ),
        (
            [MODEL, WORKER, 'stores: [{name: s, workers: ["a:1"], zmq: "tcp://h:0"}]'],
            "stores[0].zmq: must have a port above 0, is 'tcp://h:0'",
        ),
        (
            [MODEL, WORKER, "disaggregation: {min_pulled_tokens: 64}"],
            "disaggregation.min_pulled_tokens: needs disaggregation.connector: offloading",
        ),
        (
            [
                MODEL,
                WORKER,
                "extproc: {dialect: epp}",
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
def test_rule_violation_is_reported_for_a_text(sections: list[str], fault: str) -> None:
    assert faults_of(*sections) == [fault]


def test_valid_configuration_is_accepted() -> None:
    listen = (
        "extproc: {listen: 'unix:/tmp/x'}\nenvoy: {router: 'unix:/tmp/x', listen: 'localhost:1'}"
    )
    workers = with_events("zmq: 'tcp://a:5557', replay: 'tcp://b:5557', ranks: 2")
    config = parse("\n".join([MODEL, workers, listen]), "c")
    assert config.envoy.router == "unix:/tmp/x"
    assert parse("\n".join([MODEL, WORKER, MIRROR]), "c").disaggregation.mode == "mirror"
    named = [MODEL, WORKER, "recorder: {tenant_header: x-tenant}"]
    named += ["stores: [{name: s, workers: ['a:1'], zmq: 'tcp://store:5557'}]"]
    assert parse("\n".join(named), "c").recorder.tenant_header == "x-tenant"


ONE = Config(models=(Model("m"),))
PLAIN = Config()
MUTUAL = Tls(certificate="c", key="k", client_ca="a")


@pytest.mark.parametrize(
    ("key", "sections", "said"),
    [
        (
            "header",
            "policy: {name: random}",
            ["policy.header: missing; the policy random needs it"],
        ),
        ("header", "policy: {name: random, header: x}", []),
        ("header", "policy: {name: cost}", []),
        ("name", "policy: {name: random}", []),
    ],
)
def test_policy_that_reads_a_header_needs_its_name(
    key: str, sections: str, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading = Ranking(by_chance, reads_header=key)
    monkeypatch.setitem(cast("dict[str, Ranking]", POLICIES), "random", reading)
    assert key in header_keys()
    assert broken(f"{MODEL}\n{WORKER}\n{sections}") == said
    of_model = "models: [{name: m, policy: random}]"
    assert not broken(f"{of_model}\n{WORKER}\npolicy: {{header: x}}")
    assert bool(broken(f"{of_model}\n{WORKER}")) is (key == "header")


def test_header_that_a_policy_reads_must_have_a_valid_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse(f"{MODEL}\n{WORKER}", "c")
    wrong = replace(config, policy=replace(config.policy, name="a b"))
    reading = Ranking(by_chance, reads_header="name")
    monkeypatch.setitem(cast("dict[str, Ranking]", POLICIES), "random", reading)
    assert rules.broken_rules(wrong) == ["policy.name: is not a valid header name: 'a b'"]


def broken(text: str) -> list[str]:
    """The faults of a configuration, if there are any."""
    try:
        parse(text, "c")
    except ConfigError:
        return faults(text)
    return []


def of_listeners(**sections: object) -> list[str]:
    return list(listener_faults(replace(PLAIN, **sections)))  # type: ignore[arg-type]


def test_listener_faults_are_empty_by_default() -> None:
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
            "extproc.tls: listen must be host:port; for a Unix socket set extproc.socket_mode",
        ),
        (
            ExtProc("unix:/" + 107 * "x"),
            "extproc.listen: the socket's path has 108 bytes; the limit is 107",
        ),
    ],
)
def test_listener_of_the_router_must_be_valid(options: ExtProc, fault: str) -> None:
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
            "extproc.listen: the socket's path has 109 bytes; the limit is 107",
        ),
    ],
)
def test_listener_of_several_processes_needs_an_address_of_its_own(listen: str, fault: str) -> None:
    assert of_listeners(extproc=ExtProc(listen, processes=2)) == [fault]


def test_listeners_of_processes_must_not_overlap() -> None:
    two = ExtProc(processes=2)
    (fault,) = of_listeners(
        extproc=two, admin=Admin("127.0.0.1:9100"), metrics=MetricsSettings("127.0.0.1:9110")
    )
    assert "admin.listen of process 1" in fault


@pytest.mark.parametrize("key", ["drain", "bind"])
def test_drained_and_bound_feeds_are_refused_with_several_processes(key: str) -> None:
    alone = {
        "drain": WorkerEvents(drain="http://a:1"),
        "bind": WorkerEvents(zmq="tcp://*:1", bind=True),
    }
    workers = [
        WorkerSettings("a:1", events=alone[key]),
        WorkerSettings("b:1", events=WorkerEvents(zmq="tcp://b:2")),
    ]
    (fault,) = of_listeners(extproc=ExtProc(processes=2), workers=workers)
    assert fault.startswith(f"workers[0].events.{key}: cannot be shared by 2 processes")


def test_longest_socket_path_is_accepted() -> None:
    assert of_listeners(extproc=ExtProc("unix:///" + 106 * "x")) == []


def test_envoy_must_listen_on_an_ip_address() -> None:
    said = "must be ip:port, since Envoy cannot listen on a host name, is 'name:1'"
    assert of_listeners(envoy=Envoy(listen="name:1")) == [f"envoy.listen: {said}"]
    assert of_listeners(envoy=Envoy(listen="localhost:1", router="unix:x")) == []


def test_router_tls_needs_a_certificate_where_the_router_asks_for_one() -> None:
    said = "envoy.router_tls: needs certificate and key: extproc.tls.client_ca requires them"
    asks = ExtProc(tls=MUTUAL)
    assert of_listeners(extproc=asks, envoy=Envoy(router_tls=RouterTls("ca"))) == [said]
    given = RouterTls("ca", certificate="c", key="k")
    assert of_listeners(extproc=asks, envoy=Envoy(router_tls=given)) == []
    assert of_listeners(extproc=asks) == []  # another Envoy configuration is not known
    anybody = ExtProc(tls=replace(MUTUAL, client_ca=None))
    assert of_listeners(extproc=anybody, envoy=Envoy(router_tls=RouterTls("ca"))) == []
    half = Envoy(router_tls=RouterTls("ca", certificate="c"))
    assert of_listeners(envoy=half) == ["envoy.router_tls: certificate and key belong together"]


@pytest.mark.parametrize("other", ["127.0.0.1:9091", "localhost:9091", "0.0.0.0:9091"])
def test_listener_clash_is_a_fault(other: str) -> None:
    said = f"metrics.listen: 127.0.0.1:9091 is taken: admin.listen is {other}"
    assert of_listeners(admin=Admin(other)) == [said]


@pytest.mark.parametrize("other", ["[::]:9091", "127.0.0.2:9091", "a:9091", "127.0.0.1:9092"])
def test_listeners_on_different_addresses_are_valid(other: str) -> None:
    assert of_listeners(admin=Admin(other)) == []


def test_listeners_on_port_0_never_clash() -> None:
    assert of_listeners(admin=Admin("127.0.0.1:0"), metrics=MetricsSettings("127.0.0.1:0")) == []


def test_envoy_addresses_must_not_clash_with_the_router_on_one_host() -> None:
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
            ["envoy.routers.choice: standby needs two or more addresses, in order"],
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
def test_faults_of_several_routers_are_reported(routers: Routers, said: list[str]) -> None:
    assert of_listeners(envoy=Envoy(routers=routers)) == said


def test_fallback_by_session_needs_a_header_that_names_one() -> None:
    by = Envoy(fallback="ring_hash")
    assert of_listeners(envoy=by) == []
    assert of_listeners(envoy=by, policy=Policy(session_header=("x-chat",))) == []
    for none in (None, "none"):
        (said,) = of_listeners(envoy=by, policy=Policy(session_header=none))
        assert said.startswith("envoy.fallback: ring_hash needs a header")


def test_envoy_router_and_routers_exclude_each_other() -> None:
    envoy = Envoy(router="a:1", routers=Routers(("b:1",)))
    assert of_listeners(envoy=envoy) == [
        "envoy.routers: cannot be used together with envoy.router: remove one of the two"
    ]


def test_router_port_beyond_65535_is_reported() -> None:
    found = of_listeners(
        envoy=Envoy(routers=Routers(("a:65530", "b:1"))), extproc=ExtProc(processes=2)
    )
    (fault,) = found
    assert fault.startswith("envoy.routers.addresses[0]: has no port for process 1")


def test_default_envoy_addresses_never_clash() -> None:
    assert of_listeners(admin=Admin("127.0.0.1:10000")) == []


def test_malformed_address_is_reported_once() -> None:
    assert of_listeners(admin=Admin("x"), envoy=Envoy(router="y")) == [
        "admin.listen: must be host:port, is 'x'",
        "envoy.router: must be host:port, is 'y'",
    ]


def doubts(config: Config, *there: str) -> list[str]:
    return rules.doubts(config, lambda name: name in there)


LISTED = Config(models=(Model("m"),), workers=(WorkerSettings("a:1"),))
WITH_ADAPTERS = Config(models=(Model("m", lora=("a",)), Model("n", lora=("b",))))


def test_model_needs_a_worker_where_all_workers_are_listed() -> None:
    named, learning = WorkerSettings("a:1", "m"), WorkerSettings("a:2", learn=True)
    alone = replace(WITH_ADAPTERS, workers=(named,))
    assert doubts(alone) == ["models[1]: no worker serves 'n'"]
    assert doubts(replace(WITH_ADAPTERS, workers=(named, WorkerSettings("a:2", "n")))) == []
    assert doubts(replace(WITH_ADAPTERS, workers=(named, learning))) == []
    assert doubts(replace(alone, discovery=DiscoverySettings(file="x")), "x") == []
    assert doubts(Config(models=(Model("m"),), workers=(WorkerSettings("a:1"),))) == []


def test_adapters_of_a_worker_must_belong_to_a_model() -> None:
    unknown = "lora: 'x' is not in any model's lora"
    workers = (WorkerSettings("a:1", "m", lora=("a", "x")), WorkerSettings("a:2", "n", lora=()))
    assert doubts(replace(WITH_ADAPTERS, workers=workers)) == [f"workers[0].{unknown}"]
    found = FoundWorker(lora=("b", "x"))
    pods, names = Kubernetes(selector="a", worker=found), (DnsName("a", worker=found),)
    assert doubts(
        replace(WITH_ADAPTERS, discovery=DiscoverySettings(dns=names, kubernetes=pods))
    ) == [
        f"discovery.dns[0].worker.{unknown}",
        f"discovery.kubernetes.worker.{unknown}",
    ]


@pytest.mark.parametrize(
    "envoy",
    [
        Envoy(router="kvsteer:9002"),
        Envoy(routers=Routers(("unix:/x", "kvsteer:9002"), choice="standby")),
    ],
)
def test_doubts_name_a_loopback_router_that_a_remote_envoy_needs(envoy: Envoy) -> None:
    (doubt,) = doubts(replace(LISTED, envoy=envoy))
    assert doubt.startswith("extproc.listen: 127.0.0.1:9002 can be reached only from this host")
    assert "at kvsteer:9002" in doubt
    assert doubts(replace(LISTED, envoy=envoy, extproc=ExtProc("0.0.0.0:9002"))) == []


@pytest.mark.parametrize("router", ["localhost:9002", "unix:/run/kvsteer/extproc.sock"])
def test_doubts_accept_a_loopback_router_for_a_local_envoy(router: str) -> None:
    assert doubts(replace(LISTED, envoy=Envoy(router=router))) == []


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "[::1]", "localhost"])
def test_doubts_accept_operator_servers_on_loopback(host: str) -> None:
    envoy = Envoy(admin=f"{host}:9901")
    assert doubts(replace(LISTED, admin=Admin(f"{host}:9090"), envoy=envoy)) == []


def test_models_that_are_asked_about_are_named_once_and_few() -> None:
    names = [f"m{number}" for number in range(10)]
    models = f"models: [{', '.join(f'{{name: {name}}}' for name in names)}]"
    named = [*names[:8], "m0"]
    worker = 'workers: [{endpoint: "a:1", model: m0}]'
    many, twice = faults(
        "\n".join([models, worker, QUICK, f"policy: {{warm_models: [{', '.join(named)}]}}"])
    )
    assert twice == "policy.warm_models[8]: 'm0' is there twice"
    assert many == "policy.warm_models: more than 8"


@pytest.mark.parametrize(
    ("named", "deadline_ms", "fault"),
    [
        ("a, b", 249, ""),
        ("a, b", 250, "so 2 times extproc.deadline_ms must be below envoy.message_timeout_ms"),
        ("a", 249, ""),
        ("a", 250, "for 2 models in turn, so 2 times extproc.deadline_ms must be below"),
    ],
)
def test_envoy_must_wait_until_each_model_is_asked(
    named: str, deadline_ms: int, fault: str
) -> None:
    models, worker = "models: [{name: a}, {name: b}]", 'workers: [{endpoint: "a:1", model: a}]'
    extproc = f"extproc: {{deadline_ms: {deadline_ms}}}"
    text = "\n".join([models, worker, extproc, f"policy: {{warm_models: [{named}]}}"])
    if not fault:
        assert parse(text, "c").policy.warm_models == tuple(named.split(", "))
    else:
        assert fault in faults(text)[0]


@pytest.mark.parametrize(("host", "count"), [("127.0.0.1", 0), ("10.0.0.1", 1)])
def test_doubts_say_that_probes_come_in_plain_text(host: str, count: int) -> None:
    said = doubts(replace(LISTED, probe=ProbeSettings("t", f"{host}:9092")))
    assert len(said) == count
    assert all("the token come to 10.0.0.1:9092 in plain text" in one for one in said)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1", "router.example"])
def test_doubts_name_operator_servers_that_others_reach(host: str) -> None:
    admin, envoys = doubts(
        replace(LISTED, admin=Admin(f"{host}:9090"), envoy=Envoy(admin=f"{host}:9901"))
    )
    assert admin.startswith(f"admin.listen: anyone who reaches {host}:9090 can drain workers")
    assert envoys.startswith(f"envoy.admin: anyone who reaches {host}:9901 can stop Envoy")


def test_doubts_name_missing_files() -> None:
    config = replace(
        LISTED, discovery=DiscoverySettings(file="/w"), envoy=Envoy(eds_directory="/d")
    )
    assert [one.partition(":")[0] for one in doubts(config)] == [
        "discovery.file",
        "envoy.eds_directory",
    ]
    assert doubts(config, "/w", "/d") == []


def test_doubts_name_a_report_without_a_folder() -> None:
    config = replace(LISTED, report=ReportSettings("/away/report"))
    assert doubts(config) == [
        "report.file: the folder of /away/report is missing: the report is not kept"
    ]
    assert doubts(config, "/away") == []
    assert doubts(replace(LISTED, report=ReportSettings("report")), ".") == []


def test_doubts_name_a_state_file_without_a_folder() -> None:
    config = replace(LISTED, state=State("/away/state"))
    assert doubts(config) == [
        "state.file: the folder of /away/state is missing: nothing is known after a restart"
    ]
    assert doubts(config, "/away") == []


def test_doubts_name_a_recording_without_a_folder() -> None:
    config = replace(LISTED, recorder=RecorderSettings("/away/trace"))
    (listed,) = doubts(config)
    assert listed.startswith("recorder.file: the folder of /away/trace is missing")
    assert doubts(config, "/away") == []


def of_roles(mode: str | None, connector: str, *roles: str) -> str:
    """The doubts about workers with these roles."""
    workers = tuple(WorkerSettings(f"a:{port}", role=role) for port, role in enumerate(roles, 1))
    return " ".join(
        doubts(replace(ONE, workers=workers, disaggregation=Disaggregation(mode, connector)))
    )


def test_doubts_name_roles_that_leave_requests_unanswered() -> None:
    assert of_roles(None, "nixl", "both", "prefill").startswith("disaggregation.mode: missing")
    assert of_roles("header", "nixl", "decode").endswith(
        "has the role prefill, so no request is split"
    )
    assert of_roles("header", "nixl", "decode", "prefill") == ""
    assert "none takes whole requests" in of_roles("mirror", "sglang", "decode", "prefill")
    assert of_roles("mirror", "sglang", "decode", "prefill", "both") == ""
    found = replace(ONE, discovery=DiscoverySettings(dns=(DnsName("a"),)))
    assert doubts(replace(found, disaggregation=Disaggregation("header"))) == []


@pytest.mark.parametrize(
    ("sharing", "fault"),
    [
        ("url: here", "sharing.url: must be valkey://host:port, "),
        (f"url: directory:/{'x' * 80}", "sharing.url: the path has 81 bytes; the limit is 75"),
        (f"url: unix:///{'x' * 110}", "sharing.url: the path has 111 bytes; the limit is 107"),
        ("url: redis://a, name: a b", "sharing.name: must be 1 to 64 printable"),
        ('url: redis://a, channel: ""', "sharing.channel: must not be empty"),
        ("url: redis://a, ca: f", "sharing.ca: needs a url of valkeys:// or rediss://"),
        ("url: redis://a, username: u", "sharing.username: needs password_file"),
        (
            "url: directory:/a, password_file: f",
            "sharing: username and password_file are for a server",
        ),
        ("url: redis://a, tick_ms: 0", "sharing.tick_ms: must be at least 1"),
    ],
)
def test_invalid_sharing_is_a_fault(sharing: str, fault: str) -> None:
    (found,) = faults_of(MODEL, WORKER, f"sharing: {{{sharing}}}")
    assert found.startswith(fault)


def test_doubts_name_sharing_without_a_secret() -> None:
    def doubts(sharing: str) -> list[str]:
        config = parse(f"{MODEL}\n{WORKER}\nsharing: {{{sharing}}}", "c")
        return [one for one in rules.doubts(config, lambda _: True) if "sharing" in one]

    (doubt,) = doubts("url: redis://a")
    assert doubt.startswith("sharing.secret_file: without it")
    assert not doubts("url: redis://a, secret_file: f")
    assert not doubts("url: redis://a, password_file: f")
    assert not doubts("url: directory:/a")


def test_bodies_are_edited_for_mirrors_and_for_pulls_without_a_sidecar() -> None:
    pulls = Disaggregation(connector="offloading", min_pulled_tokens=64)
    assert Disaggregation("mirror").changes_bodies
    assert pulls.changes_bodies
    assert not replace(pulls, mode="header").changes_bodies
    assert not Disaggregation().changes_bodies


@pytest.mark.parametrize(
    ("models", "listener", "keys"),
    [
        ((Model("m"),), ExtProc(), ["models[0].tokenizer"]),
        ((Model("m", tokenizer="/t"),), ExtProc(), []),
        ((), ExtProc(listen="0.0.0.0:50051"), ["extproc.listen"]),
        ((), ExtProc(listen="unix:/run/k.sock"), []),
        ((), ExtProc(listen="0.0.0.0:50051", tls=Tls(certificate="c.pem", key="k.pem")), []),
    ],
)
def test_what_is_left_out_is_named(
    models: tuple[Model, ...], listener: ExtProc, keys: list[str]
) -> None:
    found = rules.omissions(Config(models=models, extproc=listener))
    assert [one.partition(": ")[0] for one in found] == keys


@pytest.mark.parametrize(
    ("prefix", "fault"),
    [
        ("llm", "must begin with / and have more than that, is 'llm'"),
        ("/", "must begin with / and have more than that, is '/'"),
        ("/a?b", "must be a path as engines see it, without ?, #, %, * and //: '/a?b'"),
        ("/a//b", "must be a path as engines see it, without ?, #, %, * and //: '/a//b'"),
        ("/" + "a" * 256, "longer than 256 characters"),
        ("/v1/", "/v1 is the beginning of an engine's own paths, is '/v1/'"),
    ],
)
def test_wrong_prefix_of_paths_is_told(prefix: str, fault: str) -> None:
    said = faults_of(MODEL, WORKER, f"extproc: {{path_prefixes: ['/llm', '{prefix}']}}")
    assert said == [f"extproc.path_prefixes[1]: {fault}"]


def test_number_of_prefixes_is_limited() -> None:
    many = ", ".join(f"/p{number}" for number in range(257))
    assert faults_of(MODEL, WORKER, f"extproc: {{path_prefixes: [{many}]}}") == [
        "extproc.path_prefixes: more than 256"
    ]


@pytest.mark.parametrize(
    ("responses", "events", "is_noted"),
    [("none", "{zmq: tcp://h:1}", True), ("usage", "{zmq: tcp://h:1}", False), ("none", "", False)],
)
def test_wrong_predictions_that_nobody_would_see_are_named(
    responses: str, events: str, *, is_noted: bool
) -> None:
    followed = f", events: {events}" if events else ""
    text = f"accounting: {{responses: {responses}}}\nworkers: [{{endpoint: h:1{followed}}}]"
    found = list(rules.unseen_causes(parse(f"models: [{{name: m}}]\n{text}", "c")))
    assert bool(found) is is_noted


def test_wrong_predictions_of_workers_to_be_found_are_named_as_well() -> None:
    config = parse("models: [{name: m}]\ndiscovery: {file: workers.yaml}", "c")
    assert len(list(rules.unseen_causes(config))) == 1


def test_hold_of_classes_that_exist_is_right() -> None:
    classes = "classes: {header: x, default: a, of: [{name: a}, {name: b, priority: 1}]}"
    text = f"{MODEL}\n{WORKER}\npolicy: {{{classes}, hold: {{classes: [b]}}}}"
    assert parse(text, "c").policy.hold.classes == ("b",)
