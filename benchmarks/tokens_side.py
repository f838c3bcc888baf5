"""Rows of the token benchmark: text to ids, and body to pick."""

import gc
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from unittest import mock

import msgspec
from indexed_workers import IndexedWorkers
from measure import Cost, Figure, Goal, Made, Result, Round, Row, interleave, or_reason
from peer_tokenizers import PEERS, Encode, ids_of
from prose import KIB, Prose, body, rendered
from workload import BLOCK_SIZE, Piece, message, stored

from extproc.config.schema import Model
from extproc.requests.dialect import NEWEST, Dialect
from extproc.requests.outline import outline_of
from extproc.requests.plain_chat import read_plain
from extproc.requests.request import CHAT_PATH, Text, parse
from extproc.routing.claims.claim_table import ClaimTable
from extproc.tokenizing.tokens import Tokenizer

MICROSECONDS = 1e6
WORKERS = 8

# Sizes of prompts in kilobytes, and how many of each make a round.
SIZES = {2: 16, 32: 4, 128: 1}

# A text with about 32k tokens, as a conversation.
LONG_CHAT = 128 * KIB

# An agent's request, and how many of them make a round.
AGENT_BYTES = 100 * KIB
AGENTS = 8


def _newest(_: str | None) -> Dialect:
    return NEWEST


FIRST_SIGHT_GOAL = Goal(1.5, "<= 1.5x")
NEXT_TURN_GOAL = Goal(0.01, "<= 1 %")


class KeyedPath:
    """KVSteer's path from body to pick. is_fast: with fastokens; otherwise `tokenizers`."""

    def __init__(self, directory: Path, *, is_fast: bool) -> None:
        self.name = "ours" if is_fast else "ours on tokenizers"
        hidden = {} if is_fast else {"fastokens": None}
        with mock.patch.dict(sys.modules, hidden):
            tokenizer = Tokenizer.load(Model("tekken", tokenizer=str(directory)))
        assert tokenizer is not None
        self._tokenizer = tokenizer
        self._workers = IndexedWorkers(WORKERS)

    def encode(self, text: str) -> "array[int]":
        """Returns the ids of a text."""
        return self._tokenizer.encode(Text(text, add_special_tokens=False))

    def pick(self, request: bytes) -> int:
        """Runs from a chat's body to pick; returns the number of tokens of the prompt."""
        return self.pick_by(CHAT_PATH, request)

    def pick_by(self, path: str, request: bytes) -> int:
        """Does the same for a request to any path, for workers of the newest release."""
        return self._workers.pick(self.ids_of(path, request)).basis.prompt_tokens

    def ids_of(self, path: str, request: bytes) -> "array[int]":
        """Returns the ids of a request's prompt, in the way in which `Queries` finds them."""
        return self._plain_ids(request) if path == CHAT_PATH else self._parsed_ids(path, request)

    def _plain_ids(self, request: bytes) -> "array[int]":
        turns, chat = self._tokenizer.plain_turns, read_plain(request)
        found = None if turns is None or chat is None else turns.find(request, chat)
        if turns is None or found is None:
            return self._parsed_ids(CHAT_PATH, request)
        return turns.finish(found)

    def _parsed_ids(self, path: str, request: bytes) -> "array[int]":
        (prompt,) = parse(path, request, _newest).prompts
        return self._tokenizer.encode(prompt)

    def store(self, ids: "array[int]") -> None:
        """Stores a prompt with these ids on a worker."""
        blocks = len(ids) // BLOCK_SIZE
        text = ids.tobytes()
        piece = Piece([hash((text, number)) & (1 << 63) - 1 for number in range(blocks)], ids)
        self._workers.apply(1, message([stored(piece)]))


def texts(directory: Path, rounds: int) -> list[Row]:
    """Returns the rows of new texts, timed from text to ids."""
    prose, ours = Prose(1), paths_of(directory)
    peers = {name: or_reason(partial(make, directory)) for name, make in PEERS.items()}
    _compare(ours, peers, prose)
    rows = []
    for kilobytes, count in SIZES.items():
        batches = batches_of(partial(prose.text, kilobytes * KIB), rounds, count)
        calls: dict[str, Callable[[str], object]] = {one.name: one.encode for one in ours}
        calls |= {name: peer for name, peer in peers.items() if not isinstance(peer, str)}
        contestants = {name: round_of(call, batches) for name, call in calls.items()}
        figures: dict[str, Result] = {**figures_of(rounds, contestants, count)}
        figures |= {name: peer for name, peer in peers.items() if isinstance(peer, str)}
        for one in ours:
            rows += [
                Row(
                    f"text to ids, {kilobytes} KB, {one.name} / {name} (us)",
                    figures[one.name],
                    figures[name],
                )
                for name in PEERS
            ]
    return rows


def first_sight(directory: Path, rounds: int) -> list[Row]:
    """Returns the rows of new conversations, timed from body to pick.

    The reference is fastokens alone, on the prompt text.
    """
    prose, ours = Prose(2), paths_of(directory)
    reference = or_reason(partial(PEERS["fastokens"], directory))
    rows = []
    for kilobytes, count in SIZES.items():
        chats = batches_of(partial(prose.turns, kilobytes * KIB), rounds, count)
        bodies = [[body(chat) for chat in batch] for batch in chats]
        contestants = {one.name: round_of(one.pick, bodies) for one in ours}
        if not isinstance(reference, str):
            prompts = [[rendered(chat) for chat in batch] for batch in chats]
            contestants["reference"] = round_of(reference, prompts)
        figures: dict[str, Result] = {**figures_of(rounds, contestants, count)}
        for one in ours:
            goal = FIRST_SIGHT_GOAL if kilobytes >= 32 and one.name == "ours" else None
            what = f"first sight, body to pick, {kilobytes} KB, {one.name} / fastokens alone (us)"
            base = figures.get("reference", str(reference))
            rows.append(Row(what, figures[one.name], base, goal))
    return rows


def known(directory: Path, rounds: int) -> list[Row]:
    """Returns the rows of next turns and of their repetitions, timed from body to pick.

    The reference is `tokenizers` on the whole text.
    """
    prose, ours = Prose(3), paths_of(directory)
    engine = PEERS["tokenizers"](directory)
    rows = []
    for kilobytes, count in SIZES.items():
        chats = batches_of(partial(prose.turns, kilobytes * KIB), rounds, count)
        longer = [[[*chat, prose.answer(), prose.question()] for chat in batch] for batch in chats]
        for batch in chats:
            for chat, one in ((chat, one) for chat in batch for one in ours):
                one.pick(body(chat))
                one.store(one.encode(rendered(chat)))
        again = [[body(chat) for chat in batch] for batch in longer]
        whole = [[rendered(chat) for chat in batch] for batch in longer]
        for what in ("next turn", "repeated"):
            contestants = {one.name: round_of(one.pick, again) for one in ours}
            contestants["reference"] = round_of(engine, whole)
            figures = figures_of(rounds, contestants, count)
            for one in ours:
                is_goal = kilobytes * KIB == LONG_CHAT and what == "next turn"
                goal = NEXT_TURN_GOAL if is_goal else None
                name = f"{what}, body to pick, {kilobytes} KB, {one.name} / tokenizers (us)"
                rows.append(Row(name, figures[one.name], figures["reference"], goal))
    return rows


def agents(_: Path, rounds: int) -> list[Row]:
    """Returns the row of agents' requests without known tokens, timed from body to marks.

    The reference only decodes their JSON.
    """
    prose, sent = Prose(4), ClaimTable(1)

    def marks(request: bytes) -> int:
        return len(sent.text_marks("tekken", outline_of(request)).keys)

    def decoded(request: bytes) -> int:
        return len(msgspec.json.decode(request))

    chats = batches_of(partial(prose.turns, AGENT_BYTES), rounds, AGENTS)
    bodies = [[body(chat) for chat in batch] for batch in chats]
    contestants = {"ours": round_of(marks, bodies), "reference": round_of(decoded, bodies)}
    figures = figures_of(rounds, contestants, AGENTS)
    what = f"agent's request, body to marks, {AGENT_BYTES // KIB} KB / JSON decoded (us)"
    return [Row(what, figures["ours"], figures["reference"])]


def paths_of(directory: Path) -> list[KeyedPath]:
    """Returns the path with each library that is installed."""
    is_there = not isinstance(or_reason(partial(PEERS["fastokens"], directory)), str)
    return [
        KeyedPath(directory, is_fast=is_fast)
        for is_fast in ((True, False) if is_there else (False,))
    ]


def _compare(ours: Sequence[KeyedPath], peers: dict[str, Encode | str], prose: Prose) -> None:
    """Checks that all give the same ids."""
    engine = peers["tokenizers"]
    assert not isinstance(engine, str)
    for _ in range(20):
        text = rendered(prose.turns(4 * KIB))
        expected = ids_of(engine(text))
        for one in ours:
            assert one.encode(text).tolist() == expected, one.name
        for name, peer in peers.items():
            assert isinstance(peer, str) or ids_of(peer(text)) == expected, name


def batches_of(make: Callable[[], Made], rounds: int, count: int) -> list[list[Made]]:
    """Returns this many prompts, and one to warm up, for every round and a round to warm up."""
    return [[make() for _ in range(count + 1)] for _ in range(rounds + 1)]


def round_of(call: Callable[..., object], batches: Sequence[Sequence[object]]) -> Round:
    """Returns a round over the next batch, whose first prompt warms up the caches."""
    coming = iter(batches)

    def one_round() -> Cost:
        first, *batch = next(coming)
        gc.collect()
        gc.disable()
        call(first)
        wall, cpu = time.perf_counter(), time.process_time()
        for one in batch:
            call(one)
        cost = Cost(time.process_time() - cpu, time.perf_counter() - wall)
        gc.enable()
        return cost

    return one_round


def figures_of(rounds: int, contestants: dict[str, Round], count: int) -> dict[str, Figure]:
    """Returns microseconds per prompt."""
    each = MICROSECONDS / count
    costs = interleave(rounds, contestants)
    return {name: Figure([cost.lesser * each for cost in costs[name]]) for name in costs}
