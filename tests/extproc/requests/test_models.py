from extproc.config.schema import Model
from extproc.requests.request import Models, ServedModel


def test_find_knows_names_aliases_and_adapters() -> None:
    models = Models([Model("a", aliases=("b",), lora=("l",)), Model("c")])
    assert models.find("a") == models.find("b") == ServedModel("a", None)
    assert models.find("l") == ServedModel("a", "l")
    assert models.find("nobody") is None


def test_find_without_a_name_returns_the_only_model() -> None:
    assert Models([Model("a")]).find(None) == ServedModel("a", None)
    assert Models([Model("a"), Model("c")]).find(None) is None


def test_default_is_the_first_model() -> None:
    assert Models([Model("a"), Model("c")]).default == "a"
