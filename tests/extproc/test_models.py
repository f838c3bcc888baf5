from extproc.config.schema import Model
from extproc.requests.request import Models, Served


def test_names_aliases_and_adapters_are_found() -> None:
    models = Models([Model("a", aliases=("b",), lora=("l",)), Model("c")])
    assert models.find("a") == models.find("b") == Served("a", None)
    assert models.find("l") == Served("a", "l")
    assert models.find("nobody") is None


def test_a_request_without_a_model_means_the_only_one() -> None:
    assert Models([Model("a")]).find(None) == Served("a", None)
    assert Models([Model("a"), Model("c")]).find(None) is None


def test_the_first_model_gets_what_names_none_that_is_known() -> None:
    assert Models([Model("a"), Model("c")]).default == "a"
