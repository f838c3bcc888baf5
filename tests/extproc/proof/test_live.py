"""Which workers are trusted for a request."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from extproc.proof.state import Comparison, GoldenVerdict, Mismatch, TokenProof
from extproc.proof.trust import Proofs
from extproc.requests.prompt import BILLING, BY_RELEASE, CONVERSATION
from kvstate.feeds.feed import FeedState

FORMS = (CONVERSATION, BILLING, CONVERSATION | BY_RELEASE)


def proofs_of(is_refuted: bool) -> Iterator[tuple[Proofs, str]]:
    """The proofs of one worker in each state of its feed, its conversations refuted or not."""
    for state in FeedState:
        feeds = SimpleNamespace(state=lambda _, state=state: state)
        fleet: Any = SimpleNamespace(feeds=feeds, blocks=None)
        record: Any = SimpleNamespace(proof=TokenProof("w"))
        proofs = Proofs(fleet, {"w": record}, lambda: 0.0)
        if is_refuted:
            found = Mismatch("a conversation", 3, 1, 2, "another template")
            verdict = GoldenVerdict(is_same=False, reason="another template", mismatch=found)
            proofs.compared(record, Comparison(1, {CONVERSATION: verdict}))
        yield proofs, state


@pytest.mark.parametrize("is_refuted", [False, True])
def test_worker_is_live_where_its_state_says_so(is_refuted: bool) -> None:
    found = {
        (state, forms): proofs.is_live("w", forms)
        for proofs, state in proofs_of(is_refuted)
        for forms in FORMS
        if proofs.is_live("w", forms) == (proofs.trust_for(forms).state("w") == "live")
    }
    assert len(found) == len(FeedState) * len(FORMS)
    assert found["live", CONVERSATION] is not is_refuted
    assert not found["stale", CONVERSATION]
