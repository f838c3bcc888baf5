"""Names the responses that engines keep, so that each tenant continues, reads and ends its own.

vLLM and SGLang keep a response under `request_id`, a field of its request, and return it as its id;
who knows an id may continue the response (`previous_response_id`), read it or cancel it
(`/v1/responses/{id}`). Sources: vLLM 0.32's `entrypoints/openai/responses/protocol.py` and
`serving.py`, SGLang 0.5.23's `entrypoints/openai/protocol.py`.

So the router writes that field, with a digest of the tenant under the secret of the salts. That
needs no memory: any router with the secret tells a tenant's ids from all others.
"""

import hmac
import re
from collections.abc import Callable

import msgspec

from extproc.requests.added_fields import members
from extproc.requests.draft import Draft
from kvstate.undecodable import UNDECODABLE

RESPONSES_PATH = "/v1/responses"
FIELD = "request_id"

_OWN, _PREVIOUS = FIELD.encode(), b"previous_response_id"
_PREFIX = "resp_"  # vLLM accepts no other ids
_DRAWN_BYTES = _DIGEST_BYTES = 16
_ID = re.compile(r"resp_([0-9a-f]{32})([0-9a-f]{32})")
_MAX_ID_BYTES = 1024  # as JSON, which may escape each letter


def responses_in(path: str) -> list[str]:
    """Returns the ids of the responses that a path names.

    What stands behind `/v1/responses/` is one; behind a prefix that a proxy takes away, any part
    that may be one of the router's own ids.
    """
    at = 3 if path.startswith(f"{RESPONSES_PATH}/") else None
    parts = enumerate(path.split("/"))
    return [one for number, one in parts if one and (number == at or one.startswith(_PREFIX))]


def names_on(path: str) -> tuple[bytes, ...]:
    """Returns the members of bodies on a path that name responses."""
    return (_OWN, _PREVIOUS) if path == RESPONSES_PATH else ()


class ResponseIds:
    """Makes ids, and tells whose they are. draw: returns so many random bytes."""

    def __init__(self, secret: bytes, draw: Callable[[int], bytes]) -> None:
        self._secret = secret
        self._draw = draw

    def new(self, tenant: bytes | None) -> str:
        """Returns an id for a response of a tenant, or of requests without one."""
        drawn = self._draw(_DRAWN_BYTES).hex()
        return f"{_PREFIX}{drawn}{self._digest(tenant, drawn)}"

    def is_own(self, tenant: bytes | None, name: str) -> bool:
        """Returns whether this is the id of a response of that tenant."""
        found = _ID.fullmatch(name)
        return found is not None and hmac.compare_digest(found[2], self._digest(tenant, found[1]))

    def _digest(self, tenant: bytes | None, drawn: str) -> str:
        whose = b"common" if tenant is None else b"tenant" + tenant
        said = b"response %b %b" % (drawn.encode(), whose)
        return hmac.digest(self._secret, said, "sha256")[:_DIGEST_BYTES].hex()

    def name(self, draft: Draft, tenant: bytes | None) -> bool:
        """Gives the response of a body an id of its tenant, and no other.

        Returns False if it continues a response of somebody else.
        """
        previous = [draft.value(one, _MAX_ID_BYTES) for one in draft.named(_PREVIOUS)]
        if not all(self._may_continue(value, tenant) for value in previous):
            return False
        for member in draft.named(_OWN):
            draft.cut(member)
        draft.add(members({FIELD: self.new(tenant)}))
        return True

    def _may_continue(self, value: bytes | None, tenant: bytes | None) -> bool:
        if value is None:
            return False
        try:
            previous = msgspec.json.decode(value, type=str | None)
        except UNDECODABLE:
            return False
        return previous is None or self.is_own(tenant, previous)
