import pytest

from extproc.config.reader import parse
from extproc.errors import ConfigError

TWO_MODELS = "models: [{name: m}, {name: n}]"
WORKER = 'workers: [{endpoint: "a:1"}]'
MODEL = "models: [{name: m}]"


def faults(*sections: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse("\n".join(sections), "c")
    return [fault.removeprefix("c: ") for fault in caught.value.faults]


def events(rest: str) -> str:
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
        ([MODEL, WORKER, "extproc: {listen: 'unix:'}"], "extproc.listen: unix: needs a path"),
        ([MODEL, WORKER, "extproc: {listen: x}"], "extproc.listen: must be host:port, is 'x'"),
        ([MODEL, WORKER, "envoy: {router: x}"], "envoy.router: must be host:port, is 'x'"),
        (
            [MODEL, WORKER, "extproc: {listen: 'unix:/x', tls: {certificate: c, key: k}}"],
            "extproc.tls: is for host:port; extproc.socket_mode says who may use a Unix socket",
        ),
        (
            [MODEL, WORKER, "extproc: {socket_mode: rw}"],
            "extproc.socket_mode: must be as \"0660\", is 'rw'",
        ),
        (
            [MODEL, WORKER, "envoy: {router_tls: {ca: a, certificate: c}}"],
            "envoy.router_tls: certificate and key belong together",
        ),
        (
            [MODEL, WORKER, "envoy: {listen: 'name:1'}"],
            "envoy.listen: must be an IP address and a port: Envoy listens on no name: 'name:1'",
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
            "policy.rank_header: is no name of a header: 'a b'",
        ),
        (
            [MODEL, WORKER, "policy: {rank_header: Content-Length}"],
            "policy.rank_header: 'Content-Length' is set or read for something else",
        ),
        (
            [MODEL, WORKER, "policy: {rank_header: X-Rank, header: x-rank}"],
            "policy.rank_header: 'X-Rank' is set or read for something else",
        ),
        (["models: [{name: m, lora: [m]}]", WORKER], "models[0]: the name 'm' is used 2 times"),
        (
            ["models: [{name: m, chat_template: /nowhere}]", WORKER],
            "models[0].chat_template: no such file: /nowhere",
        ),
        ([MODEL, 'workers: [{endpoint: "a"}]'], "workers[0].endpoint: must be host:port, is 'a'"),
        (
            [MODEL, 'workers: [{endpoint: "a:1"}, {endpoint: "a:1"}]'],
            "workers: the endpoint a:1 is given 2 times",
        ),
        ([TWO_MODELS, WORKER], "workers[0].model: missing; there are 2 models: m, n"),
        (
            [MODEL, 'workers: [{endpoint: "a:1", model: x}]'],
            "workers[0].model: 'x' is not under models",
        ),
        (
            [MODEL, events("zmq: 'a:1'")],
            "workers[0].events.zmq: must be tcp://host:port, is 'a:1'",
        ),
        (
            [MODEL, events("topic: t")],
            "workers[0].events: needs exactly one of zmq, grpc and drain",
        ),
        (
            [MODEL, events("zmq: 'tcp://a:1', grpc: 'a:2'")],
            "workers[0].events: needs exactly one of zmq, grpc and drain",
        ),
        (
            [MODEL, events("drain: 'a:1'")],
            "workers[0].events.drain: must be http://host:port, is 'a:1'",
        ),
        (
            [MODEL, events("grpc: 'a:1', replay: 'tcp://a:2'")],
            "workers[0].events.replay: needs zmq",
        ),
        ([MODEL, events("drain: 'http://a:1', bind: true")], "workers[0].events.bind: needs zmq"),
        ([MODEL, events("grpc: a")], "workers[0].events.grpc: must be host:port, is 'a'"),
        (
            [MODEL, events("zmq: 'tcp://a:65535', ranks: 2")],
            "workers[0].events.zmq: port 65535 + 2 ranks is above 65535",
        ),
        (
            [MODEL, events("zmq: 'tcp://a:5557', replay: 'tcp://a:5558', ranks: 2")],
            (
                "workers[0].events: with 2 ranks the ports of zmq and replay overlap"
                " (rank r uses both ports + r)"
            ),
        ),
    ],
)
def test_each_rule_is_told(sections: list[str], fault: str) -> None:
    assert faults(*sections) == [fault]


def test_what_breaks_no_rule_is_taken() -> None:
    listen = (
        "extproc: {listen: 'unix:/tmp/x'}\nenvoy: {router: 'unix:/tmp/x', listen: 'localhost:1'}"
    )
    workers = events("zmq: 'tcp://a:5557', replay: 'tcp://b:5557', ranks: 2")
    config = parse("\n".join([MODEL, workers, listen]), "c")
    assert config.envoy.router == "unix:/tmp/x"
