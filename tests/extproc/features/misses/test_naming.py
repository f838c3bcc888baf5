from array import array

from msgspec.structs import replace

from extproc.features.misses.naming import (
    NAMING_TURNS,
    NO_NAMES,
    Names,
    names_of,
    shown_tenant,
    whose_of,
)
from extproc.requests.parts import Part, Place
from extproc.requests.request import PLAIN_REQUEST
from extproc.requests.tenant_salt import Tenant
from extproc.routing.inputs.query import Query
from kvstate.overlap import Prompt

QUERY = Query("m", [Prompt("m", array("I", [1]))])


def turns(*texts: str) -> list[Part]:
    return [Part(Place.TURN, at, (text,), "user") for at, text in enumerate(texts)]


def test_conversation_is_named_by_its_session_and_its_first_long_turns() -> None:
    said = ("hi", *(f"a turn of some length, {number}" for number in range(9)))
    system = Part(Place.SYSTEM, 0, ("a system of some length",), "system")
    names = names_of([system, *turns(*said)], 7, "s")
    assert len(names.turns) == NAMING_TURNS
    assert names.all == (names.session, *names.turns)
    assert names_of(turns(*said), 7, "").all == names.turns
    assert names_of(turns(*said), 8, "s").all != names.all


def test_sessions_with_names_of_their_own_are_apart() -> None:
    assert Names(3).are_apart_from(4)
    assert not any([Names(3).are_apart_from(3), Names(3).are_apart_from(0)])
    assert not NO_NAMES.are_apart_from(4)


def test_tenants_share_no_names() -> None:
    requests = [replace(PLAIN_REQUEST, tenant=one) for one in (None, Tenant(b"a"), Tenant(b"b"))]
    assert len({whose_of(one, QUERY) for one in requests}) == 3
    names = [names_of((), whose_of(one, QUERY), "s") for one in requests]
    assert len({one.session for one in names}) == 3


def test_tenant_is_shown_by_digits_alone() -> None:
    assert shown_tenant(Tenant(b"team-a")) == "96c2886c"
    assert shown_tenant(Tenant(b"")) == shown_tenant(None) == ""
