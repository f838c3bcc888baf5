"""Samples: who may get ids, and what ends it."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.proof.samples import (
    AGREED,
    DISAGREED,
    HANDED,
    REFUTED,
    RESULTS,
    SAMPLE,
    UNKNOWN,
    Samples,
    step_among,
)

EVERY = 4
KINDS = ("chats",), ("chats", "tools"), ("messages",)


@pytest.fixture
def agreed() -> Samples:
    """Samples of a worker whose first one agreed."""
    samples = Samples()
    samples.note_result(AGREED, ("chats",), EVERY, 0)
    return samples


def steps(samples: Samples, count: int) -> Iterator[str]:
    """What becomes of so many chats that are not compared."""
    for _ in range(count):
        step = samples.step(("chats",))
        if step == HANDED:
            samples.note_handed(("chats",), 100)
        yield step


def test_first_request_of_each_trait_is_a_sample(agreed: Samples) -> None:
    assert Samples().step(("chats",)) == SAMPLE
    assert agreed.step(("chats",)) == HANDED
    assert agreed.step(("chats", "tools")) == SAMPLE


def test_one_of_so_many_is_a_sample_until_one_agrees(agreed: Samples) -> None:
    assert [*steps(agreed, EVERY + 1)] == [HANDED] * (EVERY - 1) + [SAMPLE] * 2
    agreed.note_result(UNKNOWN, ("chats",), EVERY, 0)
    assert agreed.step(("chats",)) == SAMPLE
    agreed.note_result(AGREED, ("chats",), EVERY, 0)
    assert [*steps(agreed, EVERY)] == [HANDED] * (EVERY - 1) + [SAMPLE]


def test_forms_that_are_proved_anew_begin_with_a_sample_and_lift_no_refutation(
    agreed: Samples,
) -> None:
    agreed.begin_anew()
    assert agreed.step(("chats",)) == SAMPLE
    agreed.note_result(DISAGREED, ("chats",), EVERY, agreed.start, "it counted 3")
    agreed.begin_anew()
    assert (agreed.step(("chats",)), agreed.refuted) == (REFUTED, "it counted 3")


def test_ids_that_were_decided_on_before_a_restart_spend_nothing(agreed: Samples) -> None:
    agreed.restart()
    agreed.note_handed(("chats",), 100)
    assert (agreed.handed_requests, agreed.step(("chats",))) == (1, SAMPLE)


def test_disagreement_ends_it_until_the_worker_starts_anew(agreed: Samples) -> None:
    assert agreed.note_result(DISAGREED, ("tools",), EVERY, 0, "it counted 3")
    assert not agreed.note_result(DISAGREED, ("tools",), EVERY, 0, "it counted 4")
    agreed.note_result(AGREED, ("chats",), EVERY, 0)
    assert (agreed.step(("chats",)), agreed.refuted) == (REFUTED, "it counted 3")
    agreed.restart()
    assert (agreed.step(("chats",)), agreed.refuted) == (SAMPLE, "")


def test_what_was_sent_before_a_start_says_nothing(agreed: Samples) -> None:
    agreed.restart()
    agreed.note_result(AGREED, ("chats",), EVERY, 0)
    assert not agreed.note_result(DISAGREED, ("chats",), EVERY, 0, "it counted 3")
    assert agreed.step(("chats",)) == SAMPLE


def test_figures_tell_what_samples_showed(agreed: Samples) -> None:
    agreed.note_result(UNKNOWN, ("chats",), EVERY, 0)
    agreed.note_handed(("chats",), 100)
    figures = {"handed_requests": 1, "handed_tokens": 100, AGREED: 1, UNKNOWN: 1}
    assert agreed.as_json() == {"refuted": "", "traits": ["chats"], **figures}


def test_worker_that_is_refuted_stops_it_wherever_the_request_goes(agreed: Samples) -> None:
    other = Samples()
    cluster = {"a": agreed, "b": other}
    assert step_among("a", cluster, ("chats",)) == (HANDED, "")
    assert step_among("b", cluster, ("chats",)) == (SAMPLE, "")
    other.note_result(DISAGREED, (), EVERY, 0, "it counted 3")
    assert step_among("a", cluster, ("chats",)) == (REFUTED, "b")


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from((*RESULTS, "restart"))), max_size=80
)


@given(OPERATIONS)
def test_ids_go_along_only_between_agreements_and_never_after_a_disagreement(
    operations: list[tuple[tuple[str, ...], str]],
) -> None:
    samples, since, is_refuted = Samples(), dict[str, int](), False
    for traits, event in operations:
        step = samples.step(traits)
        assert (step == REFUTED) == is_refuted
        if step == HANDED:
            samples.note_handed(traits, 100)
            for trait in traits:
                since[trait] += 1  # each has agreed before
                assert since[trait] < EVERY
        if event == "restart":
            samples.restart()
            since, is_refuted = {}, False
        elif step != HANDED or event == DISAGREED:
            samples.note_result(event, traits, EVERY, samples.start, "other tokens")
            is_refuted = is_refuted or event == DISAGREED
            if event == AGREED and not is_refuted:
                since |= dict.fromkeys(traits, 0)
            if is_refuted:
                since = {}
