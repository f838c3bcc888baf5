import pytest

from extproc.config.reader import changed_keys, parse

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
def test_keys_that_differ_are_named(more: str, changed: list[str]) -> None:
    assert list(changed_keys(parse(RUNNING, "c"), parse(RUNNING + more, "c"))) == changed


def test_a_list_is_one_key() -> None:
    other = """
models: [{name: m}, {name: n}]
workers: [{endpoint: '127.0.0.1:1', model: m}, {endpoint: '127.0.0.1:2', model: n}]
"""
    assert list(changed_keys(parse(RUNNING, "c"), parse(other, "c"))) == ["models", "workers"]
