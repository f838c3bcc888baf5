from kvstate.overlap import Tokens, encoded
from tests.oracles.plain_keys import chain, child, root_key

ROOT = root_key(1, b"m", None, 2)


def keys(ids: list[int], limit: int = 99) -> list[int]:
    return list(chain(ROOT, Tokens("I", ids), 2, None, limit))


def test_root_keys_differ_between_namespaces() -> None:
    spaces = [
        (1, b"m", None, 2), (1, b"m", "a", 2), (1, b"m", 1, 2), (1, b"m", "1", 2),
        (1, b"m", None, 3), (1, b"n", None, 2), (2, b"m", None, 2),
    ]  # fmt: skip
    assert len({root_key(*space) for space in spaces}) == len(spaces)


def test_chain_is_one_key_a_full_block() -> None:
    assert [len(keys([1] * count)) for count in range(6)] == [0, 0, 1, 1, 2, 2]
    assert len(keys([1] * 9, limit=3)) == 3
    assert keys([1] * 9, limit=0) == keys([1] * 9, limit=-1) == []


def test_chain_is_made_of_children() -> None:
    first = child(ROOT, Tokens("I", [1, 2]).tobytes(), None)
    assert keys([1, 2, 3, 4]) == [first, child(first, Tokens("I", [3, 4]).tobytes(), None)]


def test_key_depends_on_everything_before_it() -> None:
    assert keys([1, 2, 3, 4])[1] != keys([2, 1, 3, 4])[1]
    assert keys([1, 2, 3, 4])[0] == keys([1, 2, 9, 9])[0]


def test_salt_is_in_the_first_key_and_so_in_all() -> None:
    tokens = Tokens("I", [1, 2, 3, 4])
    plain, salted = keys([1, 2, 3, 4]), list(chain(ROOT, tokens, 2, b"tenant", 9))
    assert not set(plain) & set(salted)
    assert salted[0] == child(ROOT, tokens[:2].tobytes(), b"tenant")
    assert salted[1] == child(salted[0], tokens[2:].tobytes(), None)


def test_extras_differ_by_value_and_type() -> None:
    extras = [("1",), (1,), (b"1",), ("1", "1"), ((1,),), (["1", 1],)]
    assert len({encoded(extra) for extra in extras}) == len(extras)
    assert encoded(()) is None
