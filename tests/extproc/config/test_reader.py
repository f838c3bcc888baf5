import os
import re
import shutil
from pathlib import Path

import pytest

from extproc.base.errors import ConfigError
from extproc.config.policies import POLICIES
from extproc.config.reader import (
    MAX_FILE_BYTES,
    changed_keys,
    load,
    parse,
    parse_workers,
    values_in,
)
from extproc.config.schema import (
    Config,
    Model,
    RemoteTokenizerSettings,
    WorkerEvents,
    WorkerSettings,
)
from extproc.config.sections import SESSION_HEADERS, session_headers
from kvtools.simulator.settings import TINY_MODEL
from tests.extproc.config.faults import faults
from tests.unprivileged import unprivileged

MINIMAL = """
models: [{name: tiny}]
workers: [{endpoint: "127.0.0.1:8001"}]
"""


def test_keys_left_out_have_their_defaults() -> None:
    config = parse(MINIMAL, "c.yaml")
    assert config == Config(models=(Model("tiny"),), workers=(WorkerSettings("127.0.0.1:8001"),))
    assert config.extproc.deadline_ms == 250
    assert config.model_of(config.workers[0]) == "tiny"


def test_parse_reads_sections_lists_and_json() -> None:
    text = """{"models": [{"name": "m", "aliases": ["a"], "lora": ["l"], "tokenizer": "%s"}],
    "workers": [{"endpoint": "[::1]:1", "model": "m", "block_size": 64, "events": {
      "zmq": "tcp://a:5557", "replay": "tcp://a:5558", "topic": "t", "ranks": 1}}]}"""
    config = parse(text % TINY_MODEL, "c.json")
    assert config.models == (Model("m", ("a",), ("l",), str(TINY_MODEL)),)
    events = WorkerEvents("tcp://a:5557", "tcp://a:5558", "t", ranks=1)
    assert config.workers == (WorkerSettings("[::1]:1", "m", 64, events),)


def test_tokenizer_is_a_text_or_a_section() -> None:
    text = "models: [{name: m, tokenizer: {remote: true}}]\nworkers: [{endpoint: 'a:1'}]"
    assert parse(text, "c.yaml").models[0].tokenizer == RemoteTokenizerSettings()


def test_events_auto_asks_the_worker() -> None:
    text = "models: [{name: m}]\nworkers: [{endpoint: 'a:1', events: %s}]"
    assert parse(text % "auto", "c.yaml").workers[0].events == "auto"
    assert faults(text % "automatic") == [
        "workers[0].events: must be a mapping, or auto, is 'automatic'"
    ]


def test_events_may_come_over_grpc() -> None:
    events = "{grpc: '127.0.0.1:50051', service: sglang}"
    text = f"models: [{{name: m}}]\nworkers: [{{endpoint: 'a:1', events: {events}}}]"
    taken = WorkerEvents(grpc="127.0.0.1:50051", service="sglang")
    assert parse(text, "c.yaml").workers[0].events == taken


def test_null_stands_for_an_absent_value() -> None:
    text = "models: [{name: m, tokenizer: null}]\nworkers: [{endpoint: 'a:1', events: null}]"
    assert parse(text, "c.yaml").workers[0].events is None


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("{", "not YAML: "),
        (b"\xff\xfe\xfa", "not YAML: "),
        ("", "configuration: must be a mapping, is empty"),
        ("[]", "configuration: must be a mapping, is a list"),
        ("log: 5", "log: must be a mapping, is 5"),
        ("log: {levle: info}", "log.levle: unknown key; did you mean level?"),
        ("zzz: 1", "zzz: unknown key"),
        ("1: 2", "1: unknown key"),
        ("log: {level: loud}", "log.level: must be one of debug, info, warning, error, is 'loud'"),
        ("events: {enabled: 1}", "events.enabled: must be true or false, is 1"),
        ("extproc: {deadline_ms: yes}", "extproc.deadline_ms: must be a whole number, is True"),
        ("extproc: {deadline_ms: 0}", "extproc.deadline_ms: must be at least 1, is 0"),
        ("extproc: {listen: {}}", "extproc.listen: must be text, is a mapping"),
        ("extproc: {listen: null}", "extproc.listen: must be text, is empty"),
        ("models: x", "models: must be a list, is 'x'"),
        ("models: [{}]", "models[0].name: missing"),
        ("models: [{name: ''}]", "models[0].name: must not be empty"),
        ("models: [{name: m, tokenizer: 5}]", "models[0].tokenizer: must be text, is 5"),
        (
            "models: [{name: m, tokenizer: {remot: 1}}]",
            "models[0].tokenizer.remot: unknown key; did you mean remote?",
        ),
        ("models: [{name: m, lora: [5]}]", "models[0].lora[0]: must be text, is 5"),
        ("workers: [{endpoint: 5}]", "workers[0].endpoint: must be text, is 5"),
        (
            "extproc: {socket_mode: 0660}",
            "extproc.socket_mode: must be text, is 432 to YAML; put it in quotes",
        ),
        ("steering: {percent: 100.5}", "steering.percent: must be at most 100, is 100.5"),
        ("steering: {percent: -1}", "steering.percent: must be at least 0, is -1"),
        ("steering: {percent: .nan}", "steering.percent: must be at least 0, is nan"),
        ("steering: {percent: true}", "steering.percent: must be a number, is True"),
        ("steering: {percent: half}", "steering.percent: must be a number, is 'half'"),
        ("log: {decisions_percent: 200}", "log.decisions_percent: must be at most 100, is 200"),
        (
            "extproc: {drain_ms: 99999999999999999999}",
            "extproc.drain_ms: must be at most 31622400000, is 99999999999999999999",
        ),
        (
            "policy: {sent_bytes: 0x%s}" % ("f" * 5000),
            "policy.sent_bytes: must be at most 1099511627776, is a huge number",
        ),
        (
            'workers: [{endpoint: "a:1", events: {zmq: "tcp://a:1", ranks: 100000}}]',
            "workers[0].events.ranks: must be at most 1024, is 100000",
        ),
        (b"a: [", "not YAML: line 1, column 5: "),
        (
            "policy: cache_aware",
            "policy: must be a mapping, is 'cache_aware'; did you mean {name: cache_aware}?",
        ),
        (
            "policy: cache-aware",
            "policy: must be a mapping, is 'cache-aware'; did you mean {name: cache_aware}?",
        ),
        (
            "policy: {name: cache-aware}",
            (
                f"policy.name: must be one of {', '.join(POLICIES)}, is 'cache-aware'; did you mean"
                " cache_aware?"
            ),
        ),
        (
            "models: [{name: m, tokenizer: remote}]\nworkers: [{endpoint: 'a:1'}]",
            "models[0].tokenizer: 'remote' is no directory or file; did you mean {remote: true},",
        ),
        (
            "models: [{name: m, tokenizer: Qwen/Qwen3-8B}]\nworkers: [{endpoint: 'a:1'}]",
            "models[0].tokenizer: 'Qwen/Qwen3-8B' is no directory or file, and not in ",
        ),
        (
            "models: [{name: m, tokenizer: /nowhere}]\nworkers: [{endpoint: 'a:1'}]",
            "models[0].tokenizer: '/nowhere' is no directory or file, and no hub id in ",
        ),
        (
            "workers: [{endpoint: '${WORKER_1}:8000'}]",
            "workers[0].endpoint: ${WORKER_1} is not expanded here; write its value, or expand",
        ),
        (
            "models: [{name: '${MODEL:-m}'}]",
            "models[0].name: ${MODEL:-m} is not expanded here; ",
        ),
        (
            'workers: [{endpoint: "a:1", events: {publisher: zmq, endpoint: "tcp://*:1"}}]',
            "workers[0].events.publisher: unknown key; only vLLM uses it; leave it out here",
        ),
        (
            'workers: [{endpoint: "a:1", events: {endpoint: "tcp://*:1"}}]',
            "workers[0].events.endpoint: unknown key; that is vLLM's name; here it is zmq,",
        ),
        (
            'workers: [{endpoint: "a:1", events: {replay_endpoint: "tcp://*:1"}}]',
            "workers[0].events.replay_endpoint: unknown key; that is vLLM's name; here it is",
        ),
        (
            "extproc: {server: grpcio}",
            "extproc.server: unknown key; KVSteer has one server now; leave it out",
        ),
        (
            "stores: [{name: s, grpc: 'a:1'}]",
            "stores[0].grpc: unknown key; no store publishes over gRPC; its ZMQ publisher is named",
        ),
        ("a: 1\na: 2", "a: given in line 1 and again in line 2"),
    ],
)
def test_fault_names_its_key(text: str | bytes, fault: str) -> None:
    assert any(line.startswith(fault) for line in faults(text)), faults(text)


def test_uncached_tokenizer_fault_names_the_command_that_fetches_it() -> None:
    (fault,) = faults("models: [{name: m, tokenizer: Qwen/Qwen3-8B}]\nworkers: [{endpoint: 'a:1'}]")
    assert fault.endswith(
        ": `hf download Qwen/Qwen3-8B` fetches it; {remote: true} asks the workers instead"
    )


def test_faults_are_reported_all_at_once() -> None:
    text = """
    extproc: {deadline_ms: 600, listn: x}
    log: {level: loud}
    models: [{name: m, tokenizer: /nowhere}]
    workers: [{endpoint: nowhere}, {model: m}]
    """
    listed = "\n".join(faults(text))
    for key in (
        "extproc.listn",
        "extproc.deadline_ms",
        "log.level",
        "models[0].tokenizer",
        "workers[0].endpoint",
        "workers[1].endpoint: missing",
    ):
        assert key in listed
    assert "at least one is needed" not in listed


def test_repeated_key_is_reported_beside_other_faults() -> None:
    assert faults(f"{MINIMAL}log: {{level: loud, level: info}}\nworkers: []") == [
        "log.level: given in line 4 and again in line 4",
        "workers: given in line 3 and again in line 5",
    ]


def test_parse_workers_reads_a_watched_file_as_the_configuration() -> None:
    config = parse(MINIMAL, "c.yaml")
    with pytest.raises(ConfigError) as caught:
        parse_workers('- {endpoint: "a:1", endpoint: "a:2"}', "w", config)
    assert caught.value.faults == ["w: [0].endpoint: given in line 1 and again in line 1"]
    events = "{zmq: 'tcp://a:5557'}"
    text = f"[{{endpoint: 'a:1', events: {events}}}, {{endpoint: 'a:2', events: {events}}}]"
    with pytest.raises(ConfigError) as caught:
        parse_workers(text, "w", config)
    assert caught.value.faults == [
        "w: [1].events.zmq: a:5557 is already used by [0] (line 1; [0] in line 1)"
    ]


def test_empty_key_is_reported_once() -> None:
    assert faults("models: [{name: m}]\nworkers:") == ["workers: must be a list, is empty"]


def test_list_fault_is_reported_beside_faults_of_its_items() -> None:
    same = "127.0.0.1:1 is the endpoint of workers[0] too, as localhost:1"
    workers = "[{endpoint: 'localhost:1'}, {endpoint: '127.0.0.1:1'}, {endpoint: 'a:1', x: 1}]"
    assert faults(f"models: [{{name: m}}]\nworkers: {workers}") == [
        f"workers[1].endpoint: {same}",
        "workers[2].x: unknown key",
    ]


def test_worker_may_have_no_adapters() -> None:
    text = "models: [{name: m, lora: [a]}]\nworkers: [{endpoint: 'a:1'%s}]"
    given = [parse(text % rest, "c").workers[0].lora for rest in ("", ", lora: []", ", lora: [a]")]
    assert given == [None, (), ("a",)]


def test_load_reads_a_file(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(MINIMAL)
    assert load(str(file)).models[0].name == "tiny"


def test_number_of_processes_is_overridden_once_the_file_is_checked() -> None:
    def faults_of(extproc: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            parse(f"{MINIMAL}extproc: {extproc}", "c", processes=3)
        return caught.value.faults

    assert parse(MINIMAL, "c", processes=3).extproc.processes == 3
    assert parse(f"{MINIMAL}extproc: {{processes: 2}}", "c", processes=3).extproc.processes == 3
    assert faults_of("5") == ["c: extproc: must be a mapping, is 5 (line 4)"]
    wrong = "c: extproc.processes: must be at least 1, is 0 (line 4)"
    assert faults_of("{processes: 0}") == [wrong]
    no_port = "c: extproc.listen: has no port for process 2: 65540 is above 65535 (line 4)"
    assert faults_of("{processes: 0, listen: 'h:65520'}") == [wrong, no_port]


def test_load_reports_an_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file or directory"):
        load(str(tmp_path / "absent"))


def test_permission_fault_names_the_user(tmp_path: Path) -> None:
    closed = tmp_path / "closed" / "model"
    shutil.copytree(TINY_MODEL, closed)
    closed.parent.chmod(0)
    model = f"{{name: m, tokenizer: {closed}, chat_template: {closed}/chat_template.jinja}}"
    with unprivileged(tmp_path):
        why = f"cannot be read: Permission denied; this process runs as user {os.geteuid()}"
        assert faults(f"models: [{model}]\nworkers: [{{endpoint: 'a:1'}}]") == [
            f"models[0].tokenizer: {closed} {why}",
            f"models[0].chat_template: {closed}/chat_template.jinja {why}",
        ]
        with pytest.raises(ConfigError, match=f"absent: {why}"):
            load(str(closed / "absent"))


def test_oversized_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    with pytest.raises(ConfigError, match="larger than"):
        load(str(file))


def test_values_are_plain() -> None:
    assert values_in("a: [1, {b: c}]") == ({"a": [1, {"b": "c"}]}, [])
    assert values_in(b"") == (None, [])


def test_repeated_keys_are_reported_with_their_lines() -> None:
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


def test_number_and_its_text_are_two_keys() -> None:
    assert values_in("{1: a, '1': b}") == ({1: "a", "1": "b"}, [])


def test_merged_mapping_may_be_overridden_and_reused() -> None:
    text = "[&a {x: 1}, &b {<<: *a, x: 2}, {<<: *b, x: 3}, {<<: *a, <<: *b}]"
    values, doubles = values_in(text)
    assert (values[2], doubles) == ({"x": 3}, [])


def test_alias_may_be_circular() -> None:
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
def test_invalid_yaml_is_reported_with_its_place(text: str | bytes, why: str) -> None:
    with pytest.raises(ValueError, match="^" + re.escape(why)) as caught:
        values_in(text)
    assert "<" not in str(caught.value).replace("<stream end>", "")


def multiplied(line: str) -> str:
    """A text whose lines each use the one before nine times: 40 of them stand for 9**40 values."""
    return "".join(
        f"a{n}: &a{n} " + line % ", ".join([f"*a{n - 1}"] * 9) + "\n" for n in range(1, 40)
    )


@pytest.mark.parametrize("workers", ["*a39", "[*a39]", "[{endpoint: *a39}]", "[[*a39]]"])
def test_parse_does_not_expand_lists_of_aliases(workers: str) -> None:
    text = "a0: &a0 [x]\n" + multiplied("[%s]") + f"workers: {workers}\n"
    with pytest.raises(ConfigError, match="unknown key"):
        parse(text, "one.yaml")


def test_parse_refuses_merges_that_multiply() -> None:
    text = "a0: &a0 {x: 1}\n" + multiplied("{<<: [%s]}")
    with pytest.raises(ConfigError, match="merged ones included"):
        parse(text, "one.yaml")


def test_aliases_of_a_whole_fleet_are_accepted() -> None:
    worker = "{{<<: *common, endpoint: '10.0.{}.{}:1', events: *events}}"
    workers = "".join(f"- {worker.format(n // 250, n % 250)}\n" for n in range(2_000))
    common = "events: &events {zmq: a, replay: b, ranks: 1}\ncommon: &common {a: 1, b: {c: 2}}\n"
    values, doubles = values_in(f"{common}workers:\n{workers}")
    assert len(values["workers"]) == 2_000
    assert not doubles


RUNNING = "models: [{name: m}]\nworkers: [{endpoint: '127.0.0.1:1'}]\n"


@pytest.mark.parametrize(
    ("more", "changed"),
    [
        ("", []),
        ("log: {level: info}", []),  # its default
        ("log: {level: debug}\npolicy: {name: random}", ["log.level", "policy.name"]),
        ("policy: {cost: {busy_affinity_percent: 7}}", ["policy.cost.busy_affinity_percent"]),
        ("extproc: {tls: {certificate: a, key: b}}", ["extproc.tls"]),
        ("discovery: {file: workers.yaml}", ["discovery.file"]),
    ],
)
def test_changed_keys_names_differing_keys(more: str, changed: list[str]) -> None:
    assert list(changed_keys(parse(RUNNING, "c"), parse(RUNNING + more, "c"))) == changed


def test_changed_keys_takes_a_list_for_one_key() -> None:
    other = """
models: [{name: m}, {name: n}]
workers: [{endpoint: '127.0.0.1:1', model: m}, {endpoint: '127.0.0.1:2', model: n}]
"""
    assert list(changed_keys(parse(RUNNING, "c"), parse(other, "c"))) == ["models", "workers"]


@pytest.mark.parametrize(
    ("given", "read", "names"),
    [
        ("auto", "auto", SESSION_HEADERS),
        ("none", "none", ()),
        ("null", None, ()),
        ("X-Chat", "X-Chat", ("x-chat",)),
        ("[X-Chat, b]", ("X-Chat", "b"), ("x-chat", "b")),
        ("[]", (), ()),
    ],
)
def test_session_header_is_a_word_a_name_or_a_list(
    given: str, read: object, names: tuple[str, ...]
) -> None:
    policy = parse(f"{RUNNING}policy: {{session_header: {given}}}", "c").policy
    assert (policy.session_header, session_headers(policy.session_header)) == (read, names)


def test_session_header_of_another_kind_is_a_fault() -> None:
    with pytest.raises(ConfigError, match=r"policy\.session_header"):
        parse(f"{RUNNING}policy: {{session_header: {{a: b}}}}", "c")
    with pytest.raises(ConfigError, match=r"session_header\[1\]: must be"):
        parse(f"{RUNNING}policy: {{session_header: [a, 7]}}", "c")


def test_arguments_of_templates_are_read_as_they_are() -> None:
    arguments = "{enable_thinking: false, deep: {list: [1, 2.5, null, x]}}"
    text = f"models: [{{name: a, chat_template_kwargs: {arguments}}}]\nworkers: [{{endpoint: x:1}}]"
    (model,) = parse(text, "file").models
    expected = {"enable_thinking": False, "deep": {"list": [1, 2.5, None, "x"]}}
    assert model.chat_template_kwargs == expected


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ("[]", "must be a mapping, is a list"),
        ("{a: 2026-11-29}", "must hold only what JSON can say: texts as keys, no dates"),
        ("{1: a}", "must hold only what JSON can say: texts as keys, no dates"),
        ("{a: .nan}", "must hold only what JSON can say: texts as keys, no dates"),
        (f"{{a: {'x' * 4_096}}}", "must be at most 4096 characters of JSON"),
    ],
)
def test_arguments_of_templates_that_json_cannot_say_are_faults(given: str, fault: str) -> None:
    text = f"models: [{{name: a, chat_template_kwargs: {given}}}]\nworkers: [{{endpoint: x:1}}]"
    assert faults(text) == [f"models[0].chat_template_kwargs: {fault}"]


def test_arguments_of_the_library_are_no_arguments_of_templates() -> None:
    text = "models: [{name: a, chat_template_kwargs: {tools: []}}]\nworkers: [{endpoint: x:1}]"
    where = "models[0].chat_template_kwargs.tools"
    said = f"{where}: is no argument of a template, but of the library that runs it"
    assert faults(text) == [said]
