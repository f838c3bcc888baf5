"""What one worker that announces its blocks late does to the learned speeds of the others."""

import heapq
from array import array
from collections.abc import Callable, Mapping
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.routing.load.endpoint_load import EndpointLoad, Ticket
from extproc.routing.load.loads import Loads
from kvstate.overlap import Prompt

CONFIGURED = 8_000.0
LOOK_SECONDS = 0.05
PROMPT = Prompt("m", array("I", [0]))


class Engine:
    """A worker that computes prompts one after another, and announces each `late` seconds later.

    sizes: the tokens of its prompts, from and to. every: seconds from one prompt to the next, on
    average.
    """

    def __init__(self, rate: float, late: float, sizes: tuple[int, int], every: float) -> None:
        self.rate, self.late, self.sizes, self.every = rate, late, sizes, every
        self.next_at = self.free_at = 0.0
        self.computed: list[tuple[float, int, Ticket]] = []  # when each is announced


def honest(rate: float) -> Engine:
    return Engine(rate, 0.02, (400, 8_000), 8_400 / rate)


def lying(late: float, tokens: int = 170, every: float = 3.2) -> Engine:
    return Engine(CONFIGURED, late, (tokens, tokens), every)


def learned(engines: Mapping[str, Engine], seconds: float, seed: int = 1) -> dict[str, float]:
    """Returns the tokens per second that are learned of each engine in a simulation."""
    loads = Loads({name: EndpointLoad() for name in engines}, CONFIGURED, learns=True)
    rng, count = {name: Random(f"{seed} {name}") for name in engines}, 0
    for step in range(round(seconds / LOOK_SECONDS)):
        now = step * LOOK_SECONDS
        for name, one in engines.items():
            while one.next_at <= now:
                tokens, count = rng[name].randint(*one.sizes), count + 1
                ticket = loads.begin(name, tokens, one.next_at, prompt=PROMPT)
                one.free_at = max(one.free_at, one.next_at) + tokens / one.rate
                heapq.heappush(one.computed, (one.free_at + one.late, count, ticket))
                one.next_at += rng[name].expovariate(1 / one.every)
            while one.computed and one.computed[0][0] <= now:
                ticket = heapq.heappop(one.computed)[2]
                loads.note_computed(ticket, now)
                loads.end(ticket, now + 1.0)
            loads.look(name, now)
    return {name: loads.speed_as_json(name)["tokens_per_second"] for name in engines}


# Prompts whose announcements come one by one, and those of which several wait.
LIARS = {
    "late": lambda: Engine(CONFIGURED, 3.0, (400, 8_000), 1.0),
    "late, with small prompts": lambda: lying(3.0),
    "late, with many small prompts": lambda: lying(3.0, every=0.2),
    "late by a second, with small prompts": lambda: lying(1.0, every=1.2),
}


@pytest.mark.parametrize("liar", LIARS.values(), ids=LIARS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_late_worker_does_not_move_the_speeds_of_others(
    liar: Callable[[], Engine], seed: int
) -> None:
    rates = {"fast": 8_000, "slow": 2_000}
    others = {name: honest(rate) for name, rate in rates.items()}
    quiet = learned({**others, "liar": honest(8_000)}, 120.0, seed)
    others = {name: honest(rate) for name, rate in rates.items()}
    found = learned({**others, "liar": liar()}, 120.0, seed)
    for name, rate in rates.items():
        assert found[name] == pytest.approx(quiet[name], rel=0.15)
        assert found[name] == pytest.approx(rate, rel=0.25)


@given(
    late=st.floats(0.0, 20.0),
    tokens=st.integers(161, 20_000),
    every=st.floats(0.05, 10.0),
    seed=st.integers(0, 1_000),
)
@settings(max_examples=20)
def test_late_worker_does_not_move_the_speeds_of_a_fleet(
    late: float, tokens: int, every: float, seed: int
) -> None:
    fleet = {str(number): honest(8_000) for number in range(4)}
    found = learned({**fleet, "liar": lying(late, tokens, every)}, 30.0, seed)
    for name in fleet:
        assert found[name] == pytest.approx(8_000, rel=0.25)
