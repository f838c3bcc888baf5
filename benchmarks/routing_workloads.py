"""Workloads of the routing benchmark: prompts and arrival times. Same seed, same arrivals.

Prompts are lists of block numbers; equal prefixes have equal numbers. Lengths are whole blocks.
Each client names its session, as far as it has one: a user of a group, a chat, a reader of a
document.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

from kvtools.whatif.engines import BLOCK_TOKENS, Request
from kvtools.whatif.traces import Replay, Trace, requests_of

Workload = Callable[[Random], list[Request]]


def blocks_of(tokens: float) -> int:
    return max(1, round(tokens / BLOCK_TOKENS))


def request_of(
    at: float, prompt: list[int], answer: list[int], answer_tokens: int, session: str = ""
) -> Request:
    tokens = len(prompt) * BLOCK_TOKENS
    return Request(at, prompt, tokens, answer_tokens, answer, session=session)


def arrivals_of(rng: Random, rate: float, seconds: float) -> Iterator[float]:
    at = rng.expovariate(rate)
    while at < seconds:
        yield at
        at += rng.expovariate(rate)


def take(numbers: Iterator[int], count: int) -> list[int]:
    return list(itertools.islice(numbers, count))


def shared_prefix(
    rate: float,
    seconds: float,
    groups: int = 150,
    users: int = 5,
    prefix_tokens: int = 6_000,
    question_tokens: int = 1_200,
    answer_tokens: int = 1_000,
) -> Workload:
    """Groups of users, each group with a long system prompt, as in llm-d's published study.

    Each request is from a random user of a random group, with a new question.
    """

    def make(rng: Random) -> list[Request]:
        numbers = itertools.count()
        prefixes = [take(numbers, blocks_of(prefix_tokens)) for _ in range(groups)]
        made = []
        for at in arrivals_of(rng, rate, seconds):
            user = rng.randrange(groups * users)
            prompt = prefixes[user // users] + take(numbers, blocks_of(question_tokens))
            answer = take(numbers, blocks_of(answer_tokens))
            made.append(request_of(at, prompt, answer, answer_tokens, f"user {user}"))
        return made

    return make


def multi_turn(
    rate: float, seconds: float, turns: int = 8, pause_seconds: float = 12.0
) -> Workload:
    """Chats of several turns behind one system prompt of 1k tokens; rate: new chats a second."""

    def make(rng: Random) -> list[Request]:
        numbers = itertools.count()
        system = take(numbers, blocks_of(1_000))
        made = []
        for begin in arrivals_of(rng, rate, seconds):
            at, history = begin, system
            for _ in range(rng.randint(2, turns)):
                question = take(numbers, blocks_of(rng.lognormvariate(5.8, 0.8)))
                answer_tokens = int(min(2_000, rng.lognormvariate(5.6, 0.7)) + 16)
                answer = take(numbers, blocks_of(answer_tokens))
                session = f"chat of {begin}"
                made.append(request_of(at, history + question, answer, answer_tokens, session))
                history = history + question + answer
                at += 2.0 + answer_tokens * 0.02 + rng.expovariate(1 / pause_seconds)
        return sorted(made, key=lambda one: one.at)

    return make


def long_document(rate: float, seconds: float, tokens: int = 30_000) -> Workload:
    """Several short questions about one document each; rate: new documents a second."""

    def make(rng: Random) -> list[Request]:
        numbers = itertools.count()
        made = []
        for begin in arrivals_of(rng, rate, seconds):
            document = take(numbers, blocks_of(tokens * rng.uniform(0.5, 1.5)))
            at = begin
            for _ in range(rng.randint(3, 9)):
                question = take(numbers, 1)
                answer = take(numbers, 2)
                reader = f"reader of {begin}"
                made.append(request_of(at, document + question, answer, 200, reader))
                at += rng.expovariate(1 / 8.0)
        return sorted(made, key=lambda one: one.at)

    return make


def single_shot(rate: float, seconds: float) -> Workload:
    """Prompts without shared prefixes, of very different lengths."""

    def make(rng: Random) -> list[Request]:
        numbers = itertools.count()
        made = []
        for at in arrivals_of(rng, rate, seconds):
            prompt = take(numbers, blocks_of(min(32_000.0, rng.lognormvariate(7.2, 1.0))))
            answer_tokens = int(min(2_000, rng.lognormvariate(5.5, 0.8)) + 8)
            answer = take(numbers, blocks_of(answer_tokens))
            made.append(request_of(at, prompt, answer, answer_tokens))
        return made

    return make


def _alike(
    rate: float, seconds: float, tokens: tuple[float, float, float], answer_tokens: float
) -> Workload:
    """Prompts without shared prefixes; tokens: median, spread of the logarithm, maximum."""

    def make(rng: Random) -> list[Request]:
        numbers = itertools.count()
        made = []
        median, spread, most = tokens
        for at in arrivals_of(rng, rate, seconds):
            prompt = take(numbers, blocks_of(min(most, median * rng.lognormvariate(0, spread))))
            length = int(min(2_000, answer_tokens * rng.lognormvariate(0, 0.6)) + 16)
            made.append(request_of(at, prompt, take(numbers, blocks_of(length)), length))
        return made

    return make


def long_prompts(rate: float, seconds: float) -> Workload:
    """Prompts of some 6,000 tokens and up to 24,000, with answers of some 250."""
    return _alike(rate, seconds, (6_000, 0.6, 24_000), 250)


def short_prompts(rate: float, seconds: float) -> Workload:
    """Prompts of some 300 tokens, with answers of some 350."""
    return _alike(rate, seconds, (300, 0.7, 1_500), 350)


def herd(bursts: int, size: int, tokens: int = 8_000, pause_seconds: float = 15.0) -> Workload:
    """Bursts of requests within a second, each burst with a new system prompt."""

    def make(rng: Random) -> list[Request]:
        numbers = itertools.count()
        made = []
        for number in range(bursts):
            prefix = take(numbers, blocks_of(tokens))
            for _ in range(size):
                at = number * pause_seconds + rng.random()
                prompt = prefix + take(numbers, blocks_of(rng.uniform(200, 1_000)))
                made.append(request_of(at, prompt, take(numbers, 2), 256))
        return sorted(made, key=lambda one: one.at)

    return make


def mixed(*parts: Workload) -> Workload:
    """Several workloads at once, without common prefixes."""

    def make(rng: Random) -> list[Request]:
        made = []
        for number, part in enumerate(parts):
            for one in part(rng):
                one.blocks = [block * len(parts) + number for block in one.blocks]
                one.answer_blocks = [block * len(parts) + number for block in one.answer_blocks]
                made.append(one)
        return sorted(made, key=lambda one: one.at)

    return make


def trace(path: Path, speedup: float = 1.0) -> Workload:
    """A trace as `kvsteer whatif` reads it, such as Mooncake's.

    Raises:
        ValueError: when it is played: a line is invalid, or there is none.
    """

    def make(_: Random) -> list[Request]:
        read = Trace()
        with path.open("rb") as lines:
            read.read(str(path), lines)
        if not read.requests:
            raise ValueError(f"{path}: no request in it")
        return requests_of(read.requests, Replay(BLOCK_TOKENS, speedup))

    return make
