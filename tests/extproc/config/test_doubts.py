from dataclasses import replace

from extproc.config import Config, Discovery, DnsName, FoundWorker, Kubernetes, Model, Worker
from extproc.config.doubts import doubts

TWO = Config(models=(Model("m", lora=("a",)), Model("n", lora=("b",))))


def test_a_model_is_served_where_all_workers_are_listed_and_name_theirs() -> None:
    named, learning = Worker("a:1", "m"), Worker("a:2", learn=True)
    alone = replace(TWO, workers=(named,))
    assert doubts(alone) == ["models[1]: no worker serves 'n'"]
    assert doubts(replace(TWO, workers=(named, Worker("a:2", "n")))) == []
    assert doubts(replace(TWO, workers=(named, learning))) == []
    assert doubts(replace(alone, discovery=Discovery(file="x"))) == []
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
