from array import array
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from extproc.media.chains import MAX_CHAIN_TOKENS
from extproc.media.identities import MAX_RUNS, MAX_TOKENS, Identities, Identity
from extproc.media.learning import (
    GRACE_SECONDS,
    MAX_CHAINS,
    MAX_MATCHES,
    MAX_SECONDS,
    MAX_WAITING,
    MediaLearning,
)
from extproc.media.prompts import MediaPrompt
from kvstate.events import BlockHash, BlocksStored
from kvstate.overlap import Extra
from tests.extproc.media.stores import END, PAD, SIZE, START, Piece, Shot, Store, prompt

HEAD, ASK, MORE = range(1, 11), range(20, 27), range(40, 46)
CAT, DOG = Shot("cat"), Shot("dog")


class Lab:
    """A worker, what it stores, and what is learned of it.

    has_own_ids: whether its engine tells items apart by their ids.
    """

    def __init__(self, *, has_own_ids: bool = False) -> None:
        self.now = 0.0
        self._has_own_ids = has_own_ids
        self.identities = Identities()
        self.learning = MediaLearning(self.identities, lambda: self.now)
        self._store = Store()

    def begin(self, *pieces: Piece, is_known: bool = False, salt: str | None = None) -> MediaPrompt:
        sent = self.prompt(*pieces, salt=salt)
        self.learning.begin("w", sent, is_known=is_known)
        return sent

    def prompt(self, *pieces: Piece, salt: str | None = None) -> MediaPrompt:
        return prompt(*pieces, salt=salt, has_own_ids=self._has_own_ids)

    def store(self, *pieces: Piece, salt: str | None = None, until: int | None = None) -> None:
        event = self._store.store(*pieces, salt=salt, until=until)
        if event is not None:
            self.learning.hear("w", event)

    def event(self, *pieces: Piece, until: int | None = None) -> BlocksStored:
        """Returns the store of what is new of a prompt."""
        event = self._store.store(*pieces, until=until)
        assert event is not None
        return event

    def send(self, *pieces: Piece) -> MediaPrompt:
        """Sends a request, which is computed at once and ends."""
        sent = self.begin(*pieces)
        self.store(*pieces)
        self.learning.end(sent)
        return sent

    def known(self, shot: Shot) -> Identity | None:
        return self.identities.find(shot.name.encode())

    def name(self, shot: Shot) -> object:
        known = self.known(shot)
        return None if known is None else known.identifier


@pytest.fixture
def lab() -> Lab:
    return Lab()


def test_learning_is_idle_unless_a_request_waits(lab: Lab) -> None:
    idle = [lab.learning.is_idle]
    sent = lab.begin(HEAD, CAT)
    idle.append(lab.learning.is_idle)
    lab.learning.drop(sent)
    idle.append(lab.learning.is_idle)
    assert idle == [True, False, True]


def test_learns_what_stands_between_the_texts(lab: Lab) -> None:
    lab.send(HEAD, CAT, ASK)
    assert lab.known(CAT) == Identity("CAT", ((START, 1), (PAD, 6), (END, 1)), lead=1)


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
    st.lists(st.integers(0, 9), min_size=6, max_size=6),
    st.sampled_from(["named", "own id", "long ids"]),
)
def test_learns_every_item_whatever_stands_around_it(
    lengths: list[int], texts: list[int], way: str
) -> None:
    lab = Lab()
    shots = [
        Shot(f"s{n}", length, pad=(way != "named") * (n + 1), is_long=way == "long ids")
        for n, length in enumerate(lengths)
    ]
    pieces: list[Piece] = [range(100, 101 + texts[0])]
    for number, shot in enumerate(shots):
        pieces += [shot, range(200 + 10 * number, 200 + 10 * number + texts[number + 1])]
    lab.send(*pieces[:-1], range(300, 300 + SIZE))
    for shot in shots:
        known = lab.known(shot)
        assert known is not None
        name = shot.name.upper() if way == "named" else None
        assert (list(known.tokens), known.identifier) == (shot.ids, name)


@pytest.mark.parametrize("is_long", [False, True])
def test_learns_pads_by_their_ids(lab: Lab, is_long: bool) -> None:
    one, other, third = (
        Shot(f"s{pad}", 9, pad=pad, is_long=is_long) for pad in (5, 6, 7)
    )  # fmt: skip
    lab.send(HEAD, one, (), other, ASK)
    known = [lab.known(one), lab.known(other)]
    assert [found and list(found.tokens) for found in known] == [one.ids, other.ids]
    lab.send(HEAD, one, ASK, third, MORE)
    assert lab.known(third) is not None


@pytest.mark.parametrize("is_long", [False, True])
@pytest.mark.parametrize("until", [12, 16, 20, 24])
def test_learns_pads_that_are_stored_in_pieces(lab: Lab, is_long: bool, until: int) -> None:
    long = Shot("long", 20, pad=5, is_long=is_long)
    lab.begin(HEAD, long, ASK)
    lab.store(HEAD, long, ASK, until=until)
    lab.store(HEAD, long, ASK)
    known = lab.known(long)
    assert known is not None
    assert (list(known.tokens), known.is_whole) == (long.ids, True)


@pytest.mark.parametrize("is_long", [False, True])
def test_learns_behind_a_known_item_in_whose_middle_a_chain_begins(is_long: bool) -> None:
    known, new = (Shot(f"s{pad}", 20, pad=pad, is_long=is_long) for pad in (5, 6))
    lab, other = Lab(), Lab()
    other.send(HEAD, known, ASK)
    found = other.known(known)
    assert found is not None
    lab.identities.put(known.name.encode(), found)
    lab.event(HEAD, known, ASK, until=24)
    lab.send(HEAD, known, ASK, new, MORE)
    learned = lab.known(new)
    assert learned is not None
    assert list(learned.tokens) == new.ids


def test_learns_nothing_for_another_adapter(lab: Lab) -> None:
    lab.learning.begin("w", prompt(HEAD, CAT, ASK, lora="ad"))
    lab.store(HEAD, CAT, ASK)
    assert lab.known(CAT) is None


def test_learns_nothing_of_an_item_larger_than_any(lab: Lab) -> None:
    rows = Shot("rows", 4)
    lab.begin(HEAD, rows, ASK)
    event = Store().store(HEAD, rows, ASK)
    assert event is not None
    ids = array("I", [*HEAD, START, PAD, *range(1_000, 1_000 + 2 * MAX_RUNS), END, *ASK])
    count = len(ids) // SIZE
    huge = BlocksStored(
        [*range(count)],
        None,
        ids[: count * SIZE],
        SIZE,
        extras=[([("ROWS"), 11 - 4 * n],) for n in range(count)],
    )
    lab.learning.hear("w", huge)
    assert lab.known(rows) is None


def test_chains_are_not_longer_than_any_prompt(lab: Lab) -> None:
    half = array("I", [PAD]) * (MAX_CHAIN_TOKENS // 2 + SIZE)
    count = len(half) // SIZE
    for parent, first in ((None, 0), (count - 1, count), (2 * count - 1, 2 * count)):
        hashes: list[BlockHash] = [*range(first, first + count)]
        extras: list[Extra] = [(["CAT", 0],), *[()] * (count - 1)]
        lab.learning.hear("w", BlocksStored(hashes, parent, half, SIZE, extras=extras))
    lab.begin(HEAD, CAT, ASK)
    assert lab.known(CAT) is None


@pytest.mark.parametrize("until", [16, None])
def test_learns_the_rest_of_an_item_whose_beginning_is_known(lab: Lab, until: int | None) -> None:
    """The chain of its beginning was forgotten, or the item is stored once more."""
    long = Shot("long", 20)
    part = Identity("LONG", ((START, 1), (PAD, 9)), 1, is_whole=False)
    lab.identities.put(b"long", part)
    if until is None:
        lab.store(HEAD, long, ASK, until=20)
    other = Lab()
    other.identities, other.learning = lab.identities, MediaLearning(lab.identities, lambda: 0.0)
    other.begin(HEAD, long, ASK)
    event = (lab if until is None else other).event(HEAD, long, ASK, until=until)
    other.learning.hear("w", event)
    known = lab.known(long)
    assert known is not None
    assert known == part if until else known.is_whole


def test_learns_nothing_if_the_next_text_seems_to_begin_too_often(lab: Lab) -> None:
    lab.begin(HEAD, CAT, ASK)
    ids = array("I", [*HEAD, START, PAD, END, *[ASK[0]] * 83])
    extras: list[Extra] = [(), (), (["CAT", 3],), *[()] * 21]
    lab.learning.hear("w", BlocksStored([*range(24)], None, ids, SIZE, extras=extras))
    assert lab.known(CAT) is None


def test_learns_a_later_turn_whose_beginning_was_cached(lab: Lab) -> None:
    lab.send(HEAD, CAT, ASK)
    lab.send(HEAD, CAT, ASK, DOG, MORE)
    assert lab.name(DOG) == "DOG"


def test_learns_an_item_in_pieces(lab: Lab) -> None:
    long = Shot("long", 20)
    lab.begin(HEAD, long, ASK)
    lab.store(HEAD, long, ASK, until=20)
    known = lab.known(long)
    assert known is not None
    assert (known.count, known.is_whole) == (10, False)
    lab.store(HEAD, long, ASK)
    known = lab.known(long)
    assert known is not None
    assert (known.count, known.is_whole) == (22, True)


def test_learns_the_end_of_an_item_in_the_next_turn(lab: Lab) -> None:
    lab.send(HEAD, CAT, (20,))
    assert lab.known(CAT) == Identity("CAT", ((START, 1), (PAD, 5)), lead=1, is_whole=False)
    lab.send(HEAD, CAT, (20, *MORE))
    known = lab.known(CAT)
    assert known is not None
    assert known.is_whole


def test_learns_nothing_of_an_item_that_was_stored_before(lab: Lab) -> None:
    lab.store(HEAD, CAT, ASK)
    sent = lab.begin(HEAD, CAT, (*ASK, *MORE))
    lab.store(HEAD, CAT, (*ASK, *MORE), until=16)
    assert lab.known(CAT) is None
    lab.store(HEAD, CAT, (*ASK, *MORE))
    assert lab.name(CAT) == "CAT"  # the chain is known from before
    lab.learning.end(sent)


def test_learns_nothing_from_other_prompts(lab: Lab) -> None:
    lab.begin(HEAD, CAT, ASK, salt="red")
    lab.store(HEAD, DOG, ASK)
    lab.store(MORE, DOG, ASK, salt="red")
    lab.store(HEAD, MORE, salt="red")
    assert lab.known(CAT) is None
    lab.store(HEAD, CAT, ASK, salt="red")
    assert lab.name(CAT) == "CAT"


def test_learns_nothing_from_a_prompt_with_more_items(lab: Lab) -> None:
    lab.begin(HEAD, CAT, ASK)
    lab.store(HEAD, DOG, ASK, DOG, MORE)
    assert lab.known(CAT) is None


def test_learns_nothing_while_two_requests_are_alike(lab: Lab) -> None:
    lab.begin(HEAD, CAT, ASK)
    lab.begin(HEAD, DOG, ASK)
    lab.store(HEAD, DOG, ASK)
    lab.store(HEAD, CAT, ASK)
    assert (lab.known(CAT), lab.known(DOG)) == (None, None)


def test_learns_both_once_their_texts_differ(lab: Lab) -> None:
    long = range(100, 120)
    lab.begin(HEAD, CAT, (*long, 70, 71, 72, 73))
    lab.begin(HEAD, DOG, (*long, *MORE))
    lab.store(HEAD, DOG, (*long, *MORE), until=24)
    assert lab.known(DOG) is None
    lab.store(HEAD, DOG, (*long, *MORE, 50, 51, 52, 53))
    lab.store(HEAD, CAT, (*long, 70, 71, 72, 73))
    assert (lab.name(CAT), lab.name(DOG)) == ("CAT", "DOG")


def test_learns_the_one_that_is_left(lab: Lab) -> None:
    lab.begin(HEAD, CAT, ASK)
    lab.store(HEAD, CAT, ASK)
    lab.begin(HEAD, DOG, ASK)
    lab.store(HEAD, DOG, ASK)
    assert (lab.name(CAT), lab.name(DOG)) == ("CAT", "DOG")


def test_leaves_a_known_request_what_is_stored_for_it(lab: Lab) -> None:
    lab.send(HEAD, DOG, ASK)
    lab.learning.drop(lab.begin(HEAD, CAT, ASK))
    other = Lab()
    other.identities = lab.identities
    other.learning = MediaLearning(lab.identities, lambda: 0.0)
    other.begin(HEAD, CAT, ASK)
    other.begin(HEAD, DOG, ASK, is_known=True)
    other.store(HEAD, DOG, ASK)  # it was evicted meanwhile
    assert other.known(CAT) is None
    other.store(HEAD, CAT, ASK)
    assert other.name(CAT) == "CAT"


def test_forgets_what_another_chain_contradicts(lab: Lab) -> None:
    lab.begin(HEAD, CAT, ASK)
    lab.store(HEAD, Shot("foreign"), ASK)  # of a request that came another way
    assert lab.name(CAT) == "FOREIGN"
    lab.store(HEAD, CAT, ASK)
    assert lab.known(CAT) is None


def test_relearns_what_is_behind_a_url(lab: Lab) -> None:
    url = Shot("url", is_exact=False)
    lab.send(HEAD, url, ASK)
    lab.begin(HEAD, url, ASK)
    store = Store()
    changed = store.store(HEAD, Shot("changed", 9), ASK)
    assert changed is not None
    lab.learning.hear("w", changed)
    known = lab.known(url)
    assert known is not None
    assert (known.identifier, known.count) == ("CHANGED", 11)


def test_relearns_what_is_behind_a_url_of_a_cached_prompt(lab: Lab) -> None:
    url, store = Shot("url", is_exact=False), Store()
    store.store(HEAD)
    for seen in (Shot("first"), Shot("second")):
        lab.begin(HEAD, url, ASK)
        event = store.store(HEAD, seen, ASK)
        assert event is not None
        assert event.parent is not None
        lab.learning.hear("w", event)
        assert lab.name(url) == seen.name.upper()


def test_listens_only_while_a_request_waits(lab: Lab) -> None:
    assert not lab.learning.listens("w")
    sent = lab.begin(HEAD, CAT, ASK)
    assert lab.learning.listens("w")
    assert not lab.learning.listens("other")
    lab.learning.end(sent)
    lab.now = GRACE_SECONDS
    assert not lab.learning.listens("w")
    known = lab.begin(HEAD, CAT, ASK, is_known=True)
    assert not lab.learning.listens("w")
    lab.learning.drop(known)
    lab.learning.drop(known)
    lab.learning.end(known)
    lab.begin(HEAD, CAT, ASK)
    lab.now += MAX_SECONDS
    assert not lab.learning.listens("w")


def test_waiting_requests_are_bounded(lab: Lab) -> None:
    first = lab.begin(HEAD, CAT, ASK)
    for number in range(MAX_WAITING):
        lab.begin((number, *HEAD), DOG, ASK)
    lab.learning.end(first)
    lab.store(HEAD, CAT, ASK)
    assert lab.known(CAT) is None


def test_chains_and_matches_are_bounded(lab: Lab) -> None:
    lab.begin(HEAD, CAT, ASK)
    lab.begin(HEAD, DOG, ASK)
    for number in range(MAX_CHAINS + MAX_MATCHES):
        lab.store(HEAD, Shot(f"s{number}"), ASK)
    assert (lab.known(CAT), lab.known(DOG)) == (None, None)


def test_text_without_items_is_no_news(lab: Lab) -> None:
    text = BlocksStored([1], None, Store().store(HEAD).tokens, 8)  # type: ignore[union-attr]
    lab.learning.hear("w", text)
    lab.begin(HEAD, CAT, ASK)
    lab.learning.hear("w", text)
    assert lab.known(CAT) is None


@pytest.mark.parametrize(("whole", "is_known"), [(25, True), (26, False)])
def test_count_forgets_items_that_are_not_as_long(lab: Lab, whole: int, is_known: bool) -> None:
    sent = lab.send(HEAD, CAT, ASK)
    lab.learning.count(sent, whole)
    assert (lab.known(CAT) is not None) is is_known


def test_count_completes_the_only_open_item(lab: Lab) -> None:
    sent = lab.send(HEAD, CAT, (20,))
    lab.learning.count(sent, 19)
    known = lab.known(CAT)
    assert known is not None
    assert (list(known.tokens), known.is_whole) == (CAT.ids, True)


@pytest.mark.parametrize("whole", [11, 12])
def test_count_completes_nothing_that_does_not_fit(lab: Lab, whole: int) -> None:
    sent = lab.send(HEAD, CAT, (20,))
    lab.learning.count(sent, whole)
    known = lab.known(CAT)
    assert known is not None
    assert not known.is_whole


def test_count_completes_no_item_larger_than_any(lab: Lab) -> None:
    sent = lab.send(HEAD, CAT, (20,))
    lab.learning.count(sent, 2 * MAX_TOKENS)
    known = lab.known(CAT)
    assert known is not None
    assert not known.is_whole


def test_count_completes_no_item_whose_ids_the_template_does_not_write(lab: Lab) -> None:
    sent = prompt(HEAD, CAT, (20,))
    part = Identity("CAT", ((START, 1), (77, 3)), 1, is_whole=False)
    lab.identities.put(b"cat", part)
    lab.learning.count(sent, 40)
    assert lab.known(CAT) == part


def test_count_completes_no_unknown_and_no_repeated_item(lab: Lab) -> None:
    sent = lab.begin(HEAD, CAT, (20,))
    lab.learning.count(sent, 19)
    assert lab.known(CAT) is None
    lab.store(HEAD, CAT, (20,))
    twice = prompt(HEAD, CAT, (20,), CAT, (21,))
    lab.learning.count(twice, 60)
    known = lab.known(CAT)
    assert known is not None
    assert not known.is_whole


def test_wrong_stores_are_never_learned_as_something_else() -> None:
    rng = Random(1)
    for _ in range(200):
        lab = Lab()
        shots = [Shot(f"s{n}", rng.randrange(1, 9)) for n in range(4)]
        sent: list[list[Piece]] = [
            [HEAD, rng.choice(shots), ASK, rng.choice(shots), MORE] for _ in range(3)
        ]
        for pieces in sent:
            lab.begin(*pieces)
        for pieces in rng.sample(sent, 3):
            lab.store(*pieces, until=rng.randrange(8, 50))
            lab.store(*pieces)
        assert {lab.name(shot) for shot in shots} <= {None, *(shot.name.upper() for shot in shots)}
        assert all(lab.name(shot) in (None, shot.name.upper()) for shot in shots)
