"""What is said of a configuration beside keys that are wrong."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base.errors import ConfigError
from extproc.config.reader import parse
from extproc.config.wrong_keys import section_with, section_without, until_wrong
from tests.extproc.config.faults import faults, faults_with_lines


@dataclass(frozen=True, slots=True)
class Section:
    one: int = 1
    many: list[int] = field(default_factory=list)
    needed: str = field(kw_only=True)


def test_section_has_the_values_given_else_the_defaults() -> None:
    assert section_without(Section, (), {"needed": "a"}) == Section(needed="a")
    assert section_without(Section, (), {"one": 5, "needed": "a"}) == Section(5, needed="a")


def test_section_with_another_value_has_none_for_wrong_keys() -> None:
    section = section_without(Section, {"one", "many"}, {"needed": "a"})
    changed = section_with(section, "one", 7)
    assert (changed.one, changed.needed) == (7, "a")
    assert not hasattr(changed, "many")
    assert not hasattr(section, "one")


@pytest.mark.parametrize("wrong", ["one", "many", "needed"])
def test_rule_ends_where_it_reads_a_wrong_key(wrong: str) -> None:
    def rule(section: Section) -> Iterator[str]:
        yield "before"
        yield str(getattr(section, wrong))

    section = section_without(Section, {wrong}, {"needed": "a", wrong: 7})
    assert list(until_wrong(rule, section)) == ["before"]
    assert list(until_wrong(rule, Section(needed="a")))[1:]


@pytest.mark.parametrize("of", [Section(needed="a"), "text"])
def test_mistake_in_a_rule_is_no_wrong_key(of: object) -> None:
    with pytest.raises(AttributeError):
        list(until_wrong(lambda: [of.no_such_key]))  # type: ignore[attr-defined]


TEXT = """\
log: {level: loud}
extproc: {deadline_ms: 600, listn: x}
models:
- {name: m, tokenizer: /nowhere}
- nam: n
workers:
- {endpoint: '10.0.0.1:8000', mdoel: m}
- {endpoint: '10.0.0.1:8000', events: {zmq: 'tcp://*:5557', ranks: many}}
- 5
- {endpoint: '10.0.0.1:8000', events: {grpc: x}}
policy: {block_size: 16, block_size: 32, header: 'a b'}
discovery: {dns: [{name: a, nameserver: x}, {name: a, srv: maybe}]}
"""


def test_one_wrong_key_hides_no_other_fault() -> None:
    listed = [fault.partition(": ")[0] for fault in faults_with_lines(TEXT)]
    assert listed == [
        "log.level",
        "extproc.deadline_ms",
        "extproc.listn",
        "models[0].tokenizer",
        "models[1].nam",
        "workers[0].mdoel",
        "workers[1].endpoint",
        "workers[1].events.zmq",
        "workers[1].events.ranks",
        "workers[2]",
        "workers[3].endpoint",
        "workers[3].events.grpc",
        "policy.block_size",
        "policy.header",
        "discovery.dns",
        "discovery.dns[0].nameserver",
        "discovery.dns[1].srv",
    ]


def test_each_fault_has_its_line() -> None:
    listed = faults_with_lines(TEXT)
    lines = [int(re.findall(r"\bline (\d+)", fault)[0]) for fault in listed]
    assert lines == [1, 2, 2, 4, 5, 7, 8, 8, 8, 9, 10, 10, 11, 11, 12, 12, 12]
    assert listed[10].endswith("(line 10; workers[0] in line 7)")


RUNNING = "models: [{name: m}, {name: n}]\nworkers: [{endpoint: 'a:1', model: m}]\n"


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ("extproc: {deadline_ms: 600}\nenvoy: {message_timeout_ms: x}", "envoy.message_timeout_ms"),
        ("isolation: none\nrecorder: {tenant_header: t}", "isolation"),
        ("discovery: {dns: [{name: d, worker: {port: 90000, learn: false, model: 5}}]}", "model"),
        ("policy: {shed: true, max_in_flite: 5}", "policy.max_in_flite"),
        ("admin: {listn: '127.0.0.1:1'}\nmetrics: {listen: '127.0.0.1:9090'}", "admin.listn"),
        ("stores: [{name: s, media: [CPU], workers: 5}]", "stores[0].workers"),
    ],
)
def test_rule_that_reads_a_wrong_key_is_left_out(more: str, fault: str) -> None:
    listed = [one for one in faults(RUNNING + more) if not one.endswith("is above 65535")]
    assert len(listed) == 1, listed
    assert fault in listed[0]


# Keys of one configuration: for each, values that have the right type. Some break rules.
KEYS: dict[str, Sequence[object]] = {
    "extproc.listen": ["127.0.0.1:1", "unix:/a", "x", "0.0.0.0:9090"],
    "extproc.deadline_ms": [1, 800],
    "extproc.dialect": ["auto", "epp"],
    "extproc.processes": [1, 3],
    "admin.listen": ["127.0.0.1:9", "127.0.0.1:1", "x"],
    "envoy.listen": ["127.0.0.1:9", "127.0.0.1:1", "host:1"],
    "envoy.router": [None, "127.0.0.1:1", "router:1", "x"],
    "envoy.message_timeout_ms": [500, 1_000],
    "policy.header": [None, "a", "a b"],
    "policy.session_header": ["auto", "a", "b b"],
    "policy.shed": [False, True],
    "policy.max_in_flight": [None, 5],
    "models[0].name": ["m", "n"],
    "models[0].lora": [[], ["m"], ["l", "l"]],
    "models[1].name": ["n", "m", "o"],
    "workers[0].endpoint": ["a:1", "b:1", "x"],
    "workers[0].model": [None, "m", "p"],
    "workers[0].learn": [False, True],
    "workers[1].endpoint": ["a:1", "b:1", "*:1"],
    "workers[1].events.zmq": [None, "tcp://a:1", "tcp://*:1"],
    "workers[1].events.bind": [False, True],
    "workers[1].events.ranks": [1, 4],
    "workers[1].events.replay": [None, "tcp://a:3"],
    "workers[0].events.zmq": ["tcp://a:1", "tcp://a:4"],
    "sharing.url": ["valkey://a:1", "directory:/a", "x"],
    "sharing.username": [None, "u"],
    "sharing.password_file": [None, "/p"],
    "disaggregation.mode": [None, "header", "mirror"],
    "disaggregation.connector": ["nixl", "offloading", "sglang"],
    "disaggregation.min_pulled_tokens": [None, 4],
    "steering.percent": [5, 100],
}
VALUES = st.fixed_dictionaries({key: st.sampled_from(values) for key, values in KEYS.items()})


def text_of(values: dict[str, object]) -> str:
    """A configuration with these values, as YAML that is JSON."""
    root: dict[str, object] = {"models": [{}, {}], "workers": [{}, {}]}
    for key, value in values.items():
        at: object = root
        *path, last = key.replace("[", ".").replace("]", "").split(".")
        for name in path:
            at = at[int(name)] if isinstance(at, list) else at.setdefault(name, {})  # type: ignore[attr-defined]
        at[last] = value  # type: ignore[index]
    return json.dumps(root)


def faults_of(values: dict[str, object]) -> set[str]:
    """The faults; of names that are used several times, not how often."""
    try:
        parse(text_of(values), "c")
    except ConfigError as error:
        return {one.partition(" (line")[0].partition(" times")[0] for one in error.faults}
    return set()


@given(VALUES, st.sampled_from(sorted(KEYS)), st.data())
def test_what_is_said_beside_a_wrong_key_is_so_whatever_it_was_meant_to_be(
    values: dict[str, object], key: str, data: st.DataObject
) -> None:
    said = faults_of({**values, key: {"no": "such"}})
    meant = faults_of({**values, key: data.draw(st.sampled_from(KEYS[key]))})
    assert {one for one in said if not one.startswith(f"c: {key}")} <= meant
