from dataclasses import replace

import pytest

from extproc.config import (
    Admin,
    Config,
    Discovery,
    DnsName,
    Envoy,
    FoundWorker,
    Kubernetes,
    Model,
    Worker,
    rules,
)


def doubts(config: Config, *there: str) -> list[str]:
    return rules.doubts(config, lambda name: name in there)


ONE = Config(models=(Model("m"),), workers=(Worker("a:1"),))
TWO = Config(models=(Model("m", lora=("a",)), Model("n", lora=("b",))))


def test_a_model_is_served_where_all_workers_are_listed_and_name_theirs() -> None:
    named, learning = Worker("a:1", "m"), Worker("a:2", learn=True)
    alone = replace(TWO, workers=(named,))
    assert doubts(alone) == ["models[1]: no worker serves 'n'"]
    assert doubts(replace(TWO, workers=(named, Worker("a:2", "n")))) == []
    assert doubts(replace(TWO, workers=(named, learning))) == []
    assert doubts(replace(alone, discovery=Discovery(file="x")), "x") == []
    assert doubts(Config(models=(Model("m"),), workers=(Worker("a:1"),))) == []


def test_adapters_of_a_worker_are_some_models() -> None:
    unknown = "lora: 'x' is under no model's lora"
    workers = (Worker("a:1", "m", lora=("a", "x")), Worker("a:2", "n", lora=()))
    assert doubts(replace(TWO, workers=workers)) == [f"workers[0].{unknown}"]
    found = FoundWorker(lora=("b", "x"))
    pods, names = Kubernetes(selector="a", worker=found), (DnsName("a", worker=found),)
    assert doubts(replace(TWO, discovery=Discovery(dns=names, kubernetes=pods))) == [
        f"discovery.dns[0].worker.{unknown}",
        f"discovery.kubernetes.worker.{unknown}",
    ]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "[::1]", "localhost"])
def test_servers_for_the_operator_are_on_loopback(host: str) -> None:
    envoy = Envoy(admin=f"{host}:9901")
    assert doubts(replace(ONE, admin=Admin(f"{host}:9090"), envoy=envoy)) == []


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "10.0.0.1", "router.example"])  # noqa: S104 - text
def test_servers_for_the_operator_that_others_reach_are_doubted(host: str) -> None:
    admin, envoys = doubts(
        replace(ONE, admin=Admin(f"{host}:9090"), envoy=Envoy(admin=f"{host}:9901"))
    )
    assert admin.startswith(f"admin.listen: whoever reaches {host}:9090 can drain workers")
    assert envoys.startswith(f"envoy.admin: whoever reaches {host}:9901 can stop Envoy")


def test_files_that_are_not_there_yet_are_doubted() -> None:
    config = replace(ONE, discovery=Discovery(file="/w"), envoy=Envoy(eds_directory="/d"))
    assert [one.partition(":")[0] for one in doubts(config)] == [
        "discovery.file",
        "envoy.eds_directory",
    ]
    assert doubts(config, "/w", "/d") == []
