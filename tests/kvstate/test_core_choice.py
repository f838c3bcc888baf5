import pytest

from kvstate import index
from kvstate.index import default_core_name, make_core, plain_core_warning
from kvstate.plain_core import PlainCore
from tests.kvstate.cores import needs_compiled_core
from tests.without_core import without_core


def test_plain_core_is_available_on_request() -> None:
    assert isinstance(make_core(1, 10, compiled=False), PlainCore)


@needs_compiled_core
def test_compiled_core_is_the_default_where_it_was_built() -> None:
    assert not isinstance(make_core(1, 10), PlainCore)
    assert default_core_name() == "compiled"
    assert plain_core_warning() == ""


def test_plain_core_is_the_default_where_no_compiled_one_was_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = without_core(index, "kvstate._core", monkeypatch)
    assert isinstance(plain.make_core(1, 10), PlainCore)
    assert plain.default_core_name() == "plain"
    assert plain.default_layout().startswith("plain ")
    assert "pip install --force-reinstall --no-deps --no-cache-dir" in plain.plain_core_warning()
    with pytest.raises(RuntimeError, match="the compiled core was not built"):
        plain.make_core(1, 10, compiled=True)
