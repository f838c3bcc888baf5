"""What workers reuse, learned from the outcomes of recorded requests of real engines."""

import base64
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from extproc.base.engine import Engine, Release
from extproc.fleet.feeds.reuse import SILENT, rules_by_release
from extproc.fleet.workers import Workers
from extproc.observing.outcomes import Outcome, likely_cause
from extproc.observing.usage import Usage
from extproc.requests.prompt import CONVERSATION, INLINE_SYSTEM
from kvstate.events import Batch, Body
from kvstate.overlap import Overlap, Prompt, Tokens
from kvstate.reuse import NO_RULES, ReuseRules
from kvtools.simulator.settings import TINY_MODEL
from tests.extproc.fleet.fleets import EVENTS, until_live, workers
from tests.kvstate.test_hybrid_recordings import EAGLE, GEMMA, QWEN, records
from tests.memory_transport import MemoryTransport
from tests.waiting import until

NAME = "127.0.0.1:1"
VLLM = "{name: vllm, version: 0.32.0}"


def one_worker(
    made: list[MemoryTransport], engine: str = VLLM, models: str = "[{name: a}]"
) -> Workers:
    text = f'{{endpoint: "{NAME}", model: a, engine: {engine}, events: {EVENTS}}}'
    return workers(text, made, models=models)


def outcome_of(prompt: Prompt, overlap: Overlap, cached: int) -> Outcome:
    return Outcome(
        model="a",
        worker=NAME,
        is_moved=False,
        status=200,
        ttft_seconds=0.1,
        prompt_tokens=len(prompt.tokens),
        predicted_tokens=overlap.certain_tokens,
        reported=Usage(len(prompt.tokens), cached),
        is_comparable=True,
        prompt=prompt,
        overlaps={NAME: overlap},
    )


def note(one: Workers, outcome: Outcome) -> None:
    one.states.note_usage(outcome, partial(one.states.circumstances, outcome))


async def outcomes(one: Workers, made: list[MemoryTransport], name: str) -> AsyncIterator[Outcome]:
    """Each recorded request as it ends, after its worker's feed announced what it stored."""
    await one.start()
    await until_live(one)
    (publisher,) = made
    history: dict[int, Body] = {}
    publisher.history = history
    for record in records(name):
        prompt = Prompt("a", Tokens("I", record["prompt_token_ids"]))
        overlap = one.candidates.overlaps(prompt).get(NAME, Overlap(32))
        for frame in record["frames"]:
            history[frame["seq"]] = base64.b64decode(frame["payload_b64"])
            publisher.put(Batch(frame["seq"], history[frame["seq"]]))
        await until(lambda: has_applied(one, max(history)), "the index has what was published")
        usage = record["response"]["usage"]["prompt_tokens_details"]
        outcome = outcome_of(prompt, overlap, usage["cached_tokens"] or 0)
        note(one, outcome)
        yield outcome


def has_applied(one: Workers, number: int) -> bool:
    """Whether the batch with this number is in the index, the last one that was published."""
    (feed,) = one.followed.feeds.statuses(NAME)
    return feed.last_sequence == number and not feed.unapplied


def why_of(one: Workers, outcome: Outcome) -> tuple[str, str]:
    """The cause of a wrong prediction, and why it would be uncertain."""
    known = one.states.circumstances(outcome)
    return likely_cause(outcome, known), known.uncertain_because


def reuse_of(one: Workers) -> object:
    return next(one.states.statuses())["reuse"]


async def test_draft_is_learned_and_then_exact() -> None:
    made: list[MemoryTransport] = []
    one = one_worker(made)
    ended = [outcome async for outcome in outcomes(one, made, EAGLE)]
    assert reuse_of(one) == {
        "other_groups": [], "unit_tokens": 32, "draft_drop": 1, "uncertain_because": "",
    }  # fmt: skip
    await one.close()
    errors = [outcome.error_tokens or 0 for outcome in ended]
    assert [error for error in errors if error > 0] == [32] * 3, "until the draft was in doubt"
    assert set(errors[20:]) == {0}


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        (GEMMA, {"other_groups": [{"block_size": 32, "blocks": 4}], "unit_tokens": 32}),
        (QWEN, {"other_groups": [{"block_size": 640, "blocks": 1}], "unit_tokens": 640}),
    ],
)
async def test_hybrids_of_a_known_release_are_exact(name: str, groups: dict[str, object]) -> None:
    made: list[MemoryTransport] = []
    one = one_worker(made)
    errors = [outcome.error_tokens async for outcome in outcomes(one, made, name)]
    assert errors == [0] * 120
    assert reuse_of(one) == {**groups, "draft_drop": 0, "uncertain_because": ""}
    await one.close()


def overlap_of(one: Workers, prompt: Prompt) -> Overlap:
    return one.candidates.overlaps(prompt)[NAME]


async def test_hybrid_that_reuses_less_is_uncertain_until_it_agrees_again() -> None:
    made: list[MemoryTransport] = []
    one = one_worker(made)
    last = [outcome async for outcome in outcomes(one, made, GEMMA)][-1].prompt
    assert last is not None
    held = overlap_of(one, last)
    assert held.certain_tokens > 64
    lower = outcome_of(last, held, held.certain_tokens - 64)
    for _ in range(3):
        note(one, lower)
    assert overlap_of(one, last) == held._replace(tiers=(0, 0, 0, 0), uncertain=sum(held.tiers))
    assert likely_cause(lower, one.states.circumstances(lower)) == "group_missing"
    equal = outcome_of(last, overlap_of(one, last), held.certain_tokens)
    assert why_of(one, equal) == ("uncertain", "groups")
    for _ in range(20):
        note(one, equal)
    assert overlap_of(one, last) == held
    await one.close()


async def test_what_was_evicted_meanwhile_shows_nothing_of_the_rules() -> None:
    made: list[MemoryTransport] = []
    one = one_worker(made)
    last = [outcome async for outcome in outcomes(one, made, GEMMA)][-1].prompt
    assert last is not None
    held = overlap_of(one, last)
    more = held._replace(tiers=(sum(held.tiers) + 1, 0, 0, 0))
    for _ in range(9):
        note(one, outcome_of(last, more, 0))
    assert overlap_of(one, last) == held
    gone = outcome_of(last, more, 0)
    assert likely_cause(gone, one.states.circumstances(gone)) == "evicted"
    await one.close()


async def test_what_was_removed_before_the_prefill_stored_it_again_was_evicted() -> None:
    made: list[MemoryTransport] = []
    one = one_worker(made)
    last = [outcome async for outcome in outcomes(one, made, GEMMA)][-1].prompt
    assert last is not None
    held = overlap_of(one, last)
    lower = outcome_of(last, held, held.certain_tokens - 64)
    note(one, lower)
    assert likely_cause(lower, one.states.circumstances(lower)) == "evicted"
    assert overlap_of(one, last) == held
    await one.close()


@pytest.mark.parametrize(
    ("kind", "silent"), [("sliding_attention", True), ("full_attention", False)]
)
async def test_sglang_hybrids_are_never_certain(tmp_path: Path, kind: str, *, silent: bool) -> None:
    (tmp_path / "tokenizer.json").write_bytes((TINY_MODEL / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"layer_types": [kind]}))
    made: list[MemoryTransport] = []
    models = f"[{{name: a, tokenizer: {tmp_path}}}]"
    one = one_worker(made, "{name: sglang, version: 0.5.23}", models)
    prompts = [outcome.prompt async for outcome in outcomes(one, made, EAGLE)]
    held = overlap_of(one, prompts[-1] or Prompt("a", Tokens("I")))
    assert (held.certain_tokens == 0) is silent
    status = next(one.states.statuses())
    assert status["reuse"]["uncertain_because"] == (SILENT if silent else "")
    right = outcome_of(prompts[-1] or Prompt("a", Tokens("I")), held, held.uncertain_tokens)
    assert not silent or why_of(one, right) == ("uncertain", "groups")
    await one.close()


@pytest.mark.parametrize(
    ("engine", "rules"),
    [
        (None, NO_RULES),
        (Engine("sglang", Release(0, 5, 23)), NO_RULES),
        (Engine("vllm", Release(0, 22)), ReuseRules(announces_copies=True)),
        (Engine("vllm", Release(0, 33, 1)), ReuseRules(announces_copies=True)),
        (Engine("vllm", Release(0, 34)), NO_RULES),
    ],
)
def test_rules_by_release(engine: Engine | None, rules: ReuseRules) -> None:
    assert rules_by_release(engine) == rules


TWO_RANKS = '{zmq: "tcp://127.0.0.1:5557", replay: "tcp://127.0.0.1:5567", ranks: 2}'


async def why_uncertain(one: Workers, forms: int = 0, *, drafts: bool = False) -> tuple[str, str]:
    """The cause where all that was reported was held, but uncertain, and why it was."""
    await one.start()
    if drafts:
        one.records[NAME].reuse.suspect_draft()
    prompt = Prompt("a", Tokens("I", range(65)))
    found = outcome_of(prompt, Overlap(16, uncertain=4), 64)._replace(forms=forms)
    circumstances = one.states.circumstances(found)._replace(state="live", block_size=16)
    await one.close()
    return likely_cause(found, circumstances), circumstances.uncertain_because


@pytest.mark.parametrize(
    ("events", "forms", "drafts", "because"),
    [
        (EVENTS, INLINE_SYSTEM, False, "form"),
        (EVENTS, 0, True, "draft"),  # n-grams are counted as drafts, and drop nothing
        (EVENTS, CONVERSATION, False, "blocks"),
        (TWO_RANKS, 0, False, "rank"),
    ],
)
async def test_right_prediction_that_was_uncertain_says_why(
    events: str, forms: int, because: str, *, drafts: bool
) -> None:
    text = f'{{endpoint: "{NAME}", model: a, engine: {VLLM}, events: {events}}}'
    one = workers(text, models="[{name: a}]")
    assert await why_uncertain(one, forms, drafts=drafts) == ("uncertain", because)
