"""Under which names a conversation is found, and how its tenant is shown."""

from collections.abc import Sequence
from hashlib import sha256

import msgspec
import xxhash

from extproc.requests.parts import Part, Place
from extproc.requests.request import RoutingRequest
from extproc.requests.tenant_salt import Tenant
from extproc.routing.inputs.query import Query

# By so many first turns a conversation is found whose beginning has changed; shorter turns are
# those of too many.
NAMING_TURNS = 4
LEAST_CHARACTERS = 16

_TENANT_DIGITS = 8


class Names(msgspec.Struct, frozen=True):
    """Names under which a conversation is found: its session's, 0 for none, and its turns'.

    has_tools: whether the request has any; None if it was not read.
    """

    session: int = 0
    turns: tuple[int, ...] = ()
    has_tools: bool | None = None

    @property
    def all(self) -> tuple[int, ...]:
        """Returns all names."""
        return (self.session, *self.turns) if self.session else self.turns

    def are_apart_from(self, session: int) -> bool:
        """Returns whether a conversation is another one, since its session is named otherwise."""
        return bool(self.session and session and session != self.session)


NO_NAMES = Names()


def names_of(parts: Sequence[Part], whose: int, session: str) -> Names:
    """Returns the names of a request's conversation. whose: as `whose_of` returns it."""
    named = xxhash.xxh3_64_intdigest(session.encode("utf-8", "surrogatepass"), whose)
    turns = [
        one.digest ^ whose
        for one in parts
        if one.place is Place.TURN and sum(map(len, one.texts)) >= LEAST_CHARACTERS
    ]
    has_tools = any(one.place is Place.TOOLS for one in parts) if parts else None
    return Names(named if session else 0, tuple(turns[:NAMING_TURNS]), has_tools)


def whose_of(request: RoutingRequest, query: Query) -> int:
    """Returns 64 bits of what a request's conversations have in common: model, adapter, tenant."""
    prompt = query.prompts[0]
    tenant = b"" if request.tenant is None else request.tenant.name
    whole = repr((query.model, prompt.lora, prompt.salt, tenant))
    return xxhash.xxh3_64_intdigest(whole.encode("utf-8", "surrogatepass"))


def shown_tenant(tenant: Tenant | None) -> str:
    """Returns eight digits that stand for a tenant, those of the SHA-256 of its name; "" for none.

    What names a tenant may be a key.
    """
    known = tenant is not None and tenant.name
    return sha256(known).hexdigest()[:_TENANT_DIGITS] if known else ""
