"""Writes into a body the cache salt that keeps a tenant's blocks apart from all others'.

vLLM hashes `cache_salt` into the first block of a prompt, from which all others are chained
(vLLM 0.32, `v1/core/kv_cache_utils.py`, `generate_block_hash_extra_keys`); SGLang puts it before
its own extra key (SGLang 0.5.23, `entrypoints/openai/serving_base.py`). vLLM accepts at most 128
characters, without "@", "/", a backslash or NUL (`entrypoints/generate/base/protocol.py`).

A client's own salt is folded in: it still divides the tenant's requests, and reaches no other
tenant's blocks.
"""

import hashlib
import hmac
import re
from typing import NamedTuple

import msgspec

from extproc.requests.added_fields import members
from extproc.requests.draft import Draft
from kvstate.undecodable import UNDECODABLE

FIELD = "cache_salt"

# The paths on which SGLang reads the field (its request model of messages drops it, in 0.5.9 to
# 0.5.23), and those on which vLLM 0.32's request classes have it.
SGLANG_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})
PATHS = SGLANG_PATHS | {
    "/v1/messages",
    "/v1/chat/completions/batch",
    "/v1/embeddings",
    "/inference/v1/generate",
}

_SALT, _MODEL = FIELD.encode(), b"model"
NAMES = (_SALT, _MODEL)

# A longer value of `model` names no model, and of a longer salt only its hash counts.
MAX_MODEL_BYTES = 4096
MAX_OWN_BYTES = 1024

_SALT_BYTES = 16  # of the digest, in hexadecimal digits

# Only the last member of the outermost object is followed by a single brace and the body's end.
_AT_END = re.compile(rb'"cache_salt":"([0-9a-f]{32})"\}\Z')
_END_BYTES = 64


class Tenant(NamedTuple):
    """Whose a request is. name: b"" if it is not known. salt: what its body was given, "" for none.

    A salt into which a client's own is folded does not count.
    """

    name: bytes
    salt: str = ""


def name_apart(tenant: Tenant | None, name: str) -> str:
    """Returns a name that a client chose, so that no other tenant's equals it."""
    return name if tenant is None else f"{tenant.name.hex()} {name}"


class SaltMaker:
    """Makes salts: equal for equal tenants, and not to be guessed without the secret."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def salt(self, tenant: bytes | None, own: bytes | None) -> str:
        """Returns the salt of a tenant, or of all requests without one.

        own: the client's own salt, as JSON; None without one.
        """
        parts = (b"tenant" if tenant is not None else b"common", tenant or b"", own or b"")
        said = b"".join([b"%d:%b" % (len(part), part) for part in parts])
        return hmac.digest(self._secret, said, "sha256")[:_SALT_BYTES].hex()


class Salting(NamedTuple):
    """What a body says for itself.

    model: its model, None if it names none. own: its salt, as JSON; None without one.
    """

    model: str | None
    own: bytes | None


def salting_of(draft: Draft) -> Salting:
    """Returns what a body says of its model and salt.

    Of several members with one name the last one counts, as in the engines' parsers.
    """
    models, salts = draft.named(_MODEL), draft.named(_SALT)
    model = _name(draft.value(models[-1], MAX_MODEL_BYTES)) if models else None
    if not salts:
        return Salting(model, None)
    own = draft.value(salts[-1], MAX_OWN_BYTES)
    if own is None:
        own = b"sha256:" + hashlib.sha256(draft.view(salts[-1])).digest()
    return Salting(model, None if own == b"null" else own)


def _name(value: bytes | None) -> str | None:
    """Returns a name, None for null; for anything else a text that names nothing."""
    if value is None:
        return "\0"
    try:
        return msgspec.json.decode(value, type=str | None)
    except UNDECODABLE:
        return value.decode(errors="replace")


def write_salt(draft: Draft, salt: str) -> None:
    """Gives a body this salt as its last member, and no other salt."""
    for member in draft.named(_SALT):
        draft.cut(member)
    draft.add(members({FIELD: salt}))


def written_salt(body: bytes) -> str | None:
    """Returns the salt with which `write_salt` ended a body; None if a body ends otherwise."""
    found = _AT_END.search(body[-_END_BYTES:])
    return found[1].decode() if found else None
