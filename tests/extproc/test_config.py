from extproc.config import Config, Model, Worker


def test_a_worker_without_a_model_serves_the_first() -> None:
    config = Config(models=(Model("a"),), workers=(Worker("h:1"), Worker("h:2", model="b")))
    assert [config.model_of(worker) for worker in config.workers] == ["a", "b"]
