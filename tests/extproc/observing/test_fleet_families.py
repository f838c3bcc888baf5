from extproc.config.reader import parse
from extproc.observing.metrics import Metrics
from extproc.picking.upstreams import Judge
from extproc.workers.workers import Workers
from kvstate.fleet import Fleet

CONFIG = "models: [{name: m}]\nworkers: [{endpoint: '127.0.0.1:1'}, {endpoint: '127.0.0.1:2'}]"


async def test_a_worker_that_is_down_is_told_apart_from_one_without_events() -> None:
    workers = Workers(parse(CONFIG, "c"), Fleet(12345678, lambda: 0.0), lambda _: [])
    gone = workers.upstreams.get("127.0.0.1:2")
    assert gone is not None
    workers.upstreams.eject(gone, Judge.PROBE, "is gone")
    metrics = Metrics(workers)
    told = metrics.exposition().decode()
    assert 'kvsteer_worker_down{worker="127.0.0.1:1"} 0.0' in told
    assert 'kvsteer_worker_down{worker="127.0.0.1:2"} 1.0' in told
