"""The one rule for what a client may not say of itself in a body, and what the router says instead.

Three duties change bodies. Each names members that it takes out; the router alone may write them:

    duty        takes out                                            adds
    tenants     `cache_salt`; of responses, `request_id`             both
    classes     `priority`                                           it, where the engine reads it
    transfers   `kv_transfer_params` and others (reserved_fields)    them, where a worker pulls

A body that is not read with certainty may have such members. What is not certain is refused: by
tenants always, since its blocks would be shared; by transfers, if one of their names may be in it;
by classes, if an engine may read a priority in it. Certain is that the engines' front ends, which
read with Python's json, find no object in a body (`Unclear.NO_OBJECT`): then they find no member
either. With none of the duties, nothing is read and nothing refused.
"""

from functools import lru_cache
from typing import NamedTuple

from extproc.requests import named_media, request_class, reserved_fields, response_ids, tenant_salt
from extproc.requests.draft import Draft, Unclear, read
from kvstate.scan import NO_PARTS


class Duties(NamedTuple):
    """Which features change the body of a request."""

    tenants: bool = False
    classes: bool = False
    transfers: bool = False


def drafted(body: bytes, path: str, duties: Duties) -> Draft:
    """Returns a body without the members that these features take out of any.

    What tenants change besides depends on whose it is, and is left to their own step.

    Raises:
        UnclearError: it is not read with certainty; `must_refuse` tells whether to refuse it.
    """
    parts = named_media.PARTS if duties.tenants else NO_PARTS
    draft = read(body, _names(path, duties), parts)
    if duties.transfers:
        reserved_fields.take_out(draft)
    if duties.classes:
        request_class.take_out(draft)
    return draft


def must_refuse(why: Unclear, body: bytes | None, duties: Duties) -> bool:
    """Returns whether to refuse a request whose body is not read with certainty.

    body: None if it was not read at all.
    """
    if duties.tenants:
        return True
    is_hidden = body is None or why is Unclear.COMPRESSED
    if duties.transfers and (is_hidden or reserved_fields.may_name(body or b"")):
        return True
    return duties.classes and why is not Unclear.NO_OBJECT


@lru_cache(64)
def _names(path: str, duties: Duties) -> tuple[bytes, ...]:
    """Returns the names of the members that are looked at, those of parts first."""
    names: tuple[bytes, ...] = ()
    if duties.tenants:
        names += named_media.names_on(path) + tenant_salt.NAMES + response_ids.names_on(path)
    if duties.classes:
        names += (request_class.NAME,)
    if duties.transfers:
        names += reserved_fields.LOOKED_AT
    return names
