"""Configurations with very many faults, or very many listeners, are checked in little work."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.base import address
from extproc.base.errors import ConfigError
from extproc.config import rules
from extproc.config.reader import MAX_FAULTS, parse

CONFIG = "models: [{name: m}]\nworkers: [{endpoint: '127.0.0.1:1'}]\n"


@given(st.integers(0, 300), st.integers(0, 300))
def test_faults_are_all_counted_and_few_are_shown(many: int, nested: int) -> None:
    keys = "".join(f"key_{number}: 1\n" for number in range(many))
    inside = ", ".join(f"a{number}: 1" for number in range(nested))
    suggested = 0

    def counting(*_: Any, **__: Any) -> list[str]:
        nonlocal suggested
        suggested += 1
        return []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("difflib.get_close_matches", counting)
        if many + nested == 0:
            parse(CONFIG, "c")
            return
        with pytest.raises(ConfigError) as raised:
            parse(f"{CONFIG}{keys}admin: {{{inside}}}\n", "c")
    faults = raised.value.faults
    assert suggested <= MAX_FAULTS
    assert len(faults) == min(many + nested, MAX_FAULTS + 1)
    if many + nested > MAX_FAULTS:
        assert faults[-1] == f"c: and {many + nested - MAX_FAULTS} more faults"


HOSTS = ["127.0.0.1", "127.0.0.2", "localhost", "0.0.0.0", "[::]", "[::1]", "a.example", "10.0.0.1"]
LISTENERS = st.lists(
    st.tuples(st.sampled_from(HOSTS), st.sampled_from((0, 80, 81, "x"))), max_size=12
)


def clashing(listeners: list[tuple[str, str]]) -> list[str]:
    """Compares every pair."""
    found = []
    for position, (key, text) in enumerate(listeners):
        for before, other in listeners[:position]:
            if same(text, other):
                found.append(f"{key}: {text} is taken: {before} is {other}")
                break
    return found


def same(one: str, other: str) -> bool:
    try:
        places = [address.same_place(address.parse(text)) for text in (one, other)]
    except ValueError:
        return False
    first, second = places
    if first.port != second.port or not first.port:
        return False
    wild = {"0.0.0.0": False, "::": True}
    covers = [
        a.host in wild and b.is_ip and (":" in b.host) == wild[a.host]
        for a, b in (places, places[::-1])
    ]
    return first.host == second.host or any(covers)


@given(LISTENERS)
def test_clashes_equal_those_of_every_pair(places: list[tuple[str, object]]) -> None:
    listeners = [(f"key{number}", f"{host}:{port}") for number, (host, port) in enumerate(places)]
    assert list(rules.clashes(listeners)) == clashing(listeners)


@pytest.mark.parametrize("count", [100, 1_000])
def test_clashes_parse_each_listener_once(count: int) -> None:
    listeners = [(f"key{one}", f"127.0.0.1:{one + 1}") for one in range(count)]
    parsed: list[str] = []

    def parse_address(text: str) -> address.Address:
        parsed.append(text)
        return address.parse(text)

    assert not list(rules.clashes(listeners, parse_address))
    assert parsed == [text for _, text in listeners]
