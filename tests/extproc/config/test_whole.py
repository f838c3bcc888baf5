from extproc.config import Config, Model, Worker


def test_a_worker_serves_its_model_or_the_only_one() -> None:
    config = Config(models=(Model("m"),))
    assert config.model_of(Worker("10.0.0.1:1")) == "m"
    assert config.model_of(Worker("10.0.0.1:1", model="n")) == "n"
