from extproc.media.prompts import filled
from kvstate.media import MediaIds
from tests.extproc.media.stores import Shot
from tests.extproc.media.test_learning import ASK, HEAD, MORE, Lab


def own(name: str, pad: int) -> Shot:
    return Shot(name, 9, pad=pad, is_long=True)


CAT, DOG, COW = own("cat", 5), own("dog", 6), own("cow", 7)
# an engine that makes one thing of both
BOTH = own("cat", 8), own("dog", 8)


def sure_tokens(lab: Lab) -> int | None:
    sent = lab.prompt(HEAD, CAT, ASK, DOG, MORE)
    is_split = lab.learning.splits.is_proved("tiny")
    return filled(sent, lab.identities.find, MediaIds(1), is_split=is_split).sure_tokens


def test_item_that_is_the_same_beside_a_new_one_proves_that_items_are_split() -> None:
    lab = Lab(has_own_ids=True)
    lab.send(HEAD, CAT, ASK)
    lab.send(HEAD, CAT, ASK, DOG, MORE)
    assert lab.known(DOG) is not None
    assert sure_tokens(lab) is None


def test_items_that_were_only_seen_together_are_uncertain() -> None:
    lab = Lab(has_own_ids=True)
    lab.send(HEAD, CAT, ASK, DOG, MORE)
    assert lab.known(DOG) is not None
    assert sure_tokens(lab) == len(HEAD)


def test_engines_that_name_items_split_them() -> None:
    lab = Lab()
    lab.send(HEAD, Shot("cat"), ASK, Shot("dog"), MORE)
    assert sure_tokens(lab) is None


def test_known_item_that_is_another_beside_a_second_one_refutes_it() -> None:
    lab = Lab(has_own_ids=True)
    lab.send(HEAD, CAT, ASK)
    lab.send(HEAD, CAT, ASK, DOG, MORE)
    lab.now += 9
    lab.begin(HEAD, CAT, ASK, COW, MORE)
    lab.store(HEAD, own("cat", 9), ASK, own("cow", 9), MORE)
    assert sure_tokens(lab) == len(HEAD)


def test_nothing_is_learned_of_items_that_have_one_id_together() -> None:
    lab = Lab(has_own_ids=True)
    lab.begin(HEAD, CAT, ASK, DOG, MORE)
    lab.store(HEAD, BOTH[0], ASK, BOTH[1], MORE)
    assert lab.known(CAT) is None
    assert lab.known(DOG) is None
