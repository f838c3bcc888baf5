from kvstate.seldom import is_logged


def test_ever_fewer_of_many_occurrences_are_logged() -> None:
    assert [count for count in range(1, 1_000) if is_logged(count)] == [
        *(1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
    ]
