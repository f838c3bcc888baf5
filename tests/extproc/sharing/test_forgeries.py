"""Whatever a router that knows the secret says of claims, figures and homes, another one stands it.

Also run under sanitizers: what it says is counted by the compiled core.
"""

import struct

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from extproc.routing.load.loads import MAX_REPORTED_WINDOWS
from extproc.routing.load.reports import WorkerLoadReport
from extproc.sharing.messages import (
    ClaimReport,
    HomeKind,
    HomeReport,
    OutlineReport,
    RouterReport,
    encoded,
    worker_id,
)
from tests.extproc.sharing.routers import FORGET_SECONDS, KEYS, WORKERS, Router, introduce

FADED_SECONDS = 60.0

NUMBERS = st.sampled_from([0, 1, 2, 3, 40, 2**31, 2**53, 2**63 - 1])
PLACES = st.sampled_from([*(worker_id(KEYS, one) for one in WORKERS), 7, 2**63 - 1])
TEXTS = st.builds(
    lambda piece, times, cut: (piece * times)[: len(piece) * times - cut],
    st.binary(min_size=8, max_size=8),
    st.sampled_from([1, 1, 2, 8, 40, 200, 700, 2_000]),
    st.sampled_from([0, 0, 0, 0, 0, 1, 7]),
)
KEYS_OF_CLAIMS = TEXTS | st.binary(min_size=8, max_size=8).map(lambda piece: piece * 3)
LENGTHS = st.lists(st.integers(0, 2**32 - 1), max_size=8).map(
    lambda found: struct.pack(f"<{len(found)}I", *sorted(found))
)
COUNTS = NUMBERS | st.integers(0, 1_000_000)
FIGURES = st.lists(st.builds(WorkerLoadReport, PLACES, *[COUNTS] * 5), max_size=3).map(tuple)
OUTLINES = st.builds(OutlineReport, NUMBERS, PLACES, KEYS_OF_CLAIMS, LENGTHS | TEXTS)
HOMES = st.builds(
    HomeReport, PLACES, KEYS_OF_CLAIMS, st.sampled_from(HomeKind), st.just(b"") | TEXTS, LENGTHS
)
NEWS = st.builds(
    RouterReport,
    st.just("one"),
    st.just(1),
    st.just(0),
    st.just(0),
    is_whole=st.booleans(),
    workers=FIGURES,
    claims=st.lists(st.builds(ClaimReport, NUMBERS, PLACES, KEYS_OF_CLAIMS), max_size=4).map(tuple),
    ended=st.lists(NUMBERS, max_size=4).map(tuple),
    withdrawn=st.lists(NUMBERS, max_size=4).map(tuple),
    outlines=st.lists(OUTLINES, max_size=2).map(tuple),
    homes=st.lists(HOMES, max_size=2).map(tuple),
)


@given(st.lists(NEWS, max_size=6))
def test_forged_news_are_merged_or_refused_and_forgotten(reports: list[RouterReport]) -> None:
    other = Router("other")
    introduce(other, RouterReport("one", 1, 1, 0), 0.0)
    for at, news in enumerate(reports):
        sent = msgspec.structs.replace(news, sequence=at + 2)
        other.hear([encoded(sent, KEYS)], at / 100)
    counts = other.others.counts
    assert sum(counts.values()) >= len(reports)
    other.others.forget(3 * FORGET_SECONDS)
    assert not other.others.peers
    at_once = [other.load(one, 3 * FORGET_SECONDS).utilization for one in WORKERS]
    assert max(at_once) <= MAX_REPORTED_WINDOWS  # what was sent lately fades, whoever told of it
    assert all(other.load(one, FADED_SECONDS).utilization < 1.0 for one in WORKERS)
