"""Keeps the tenants' caches apart: gives each request the salt of its tenant, or refuses it.

A request that a model would answer without a salt is refused: its blocks would be shared with
everybody. So are POST requests to paths that are not known: a newer engine may compute there.
"""

import secrets
from collections.abc import Callable, Collection, Sequence
from enum import StrEnum
from typing import NamedTuple

from extproc.base.engine import VLLM
from extproc.config.schema import Model
from extproc.config.sections import REFUSE, Isolation
from extproc.requests import grpc_request
from extproc.requests.draft import Draft, Unclear
from extproc.requests.named_media import names_media
from extproc.requests.refusals import (
    Refusal,
    refused_body,
    refused_media,
    refused_response,
    refused_tenant,
    unread_body,
    unsalted_api,
)
from extproc.requests.request import (
    NOT_INFERENCE,
    Models,
    RoutingRequest,
    has_empty_segment,
    may_compute,
)
from extproc.requests.response_ids import RESPONSES_PATH, ResponseIds, responses_in
from extproc.requests.tenant_salt import (
    PATHS,
    SGLANG_PATHS,
    Salting,
    SaltMaker,
    Tenant,
    salting_of,
    write_salt,
)


class IsolationOutcome(StrEnum):
    """What became of a request, as it is counted."""

    SALTED = "salted"
    COMMON = "common"
    SHARED = "shared"
    NO_TENANT = "no_tenant"
    SEVERAL_TENANTS = "several_tenants"
    API = "api"
    RESPONSE = "response"
    MEDIA = "media"
    BODY = "body"
    UNREAD = "unread"


class Separation(NamedTuple):
    """What became of a request: what is counted, None if it calls no model, and its refusal if any.

    tenant: whose it is, and the salt that its body was given; None if it stays as it is.
    """

    outcome: IsolationOutcome | None
    refusal: Refusal | None = None
    tenant: Tenant | None = None


class TenantToSalt(NamedTuple):
    """The tenant of a request whose body is to be salted, None for requests without one.

    unread: the models whose workers might read no salt on its path.
    """

    tenant: bytes | None
    unread: Collection[str]


class Tenants:
    """Writes the tenants' salts. header: the name of the one that names the tenant, lower case.

    engines_of: returns the names of the engines that a model's workers are known to run.
    """

    def __init__(
        self,
        rules: Isolation,
        models: Sequence[Model],
        secret: bytes,
        engines_of: Callable[[str], Collection[str]],
    ) -> None:
        self.header = rules.header.lower()
        self._refuses_unnamed = rules.without_tenant == REFUSE
        self._shared = frozenset(rules.share)
        self._models = Models(models)
        self._names = [model.name for model in models]
        self._engines_of = engines_of
        self._maker = SaltMaker(secret)
        self._ids = ResponseIds(secret, secrets.token_bytes)

    def admit(self, request: RoutingRequest, named: Sequence[bytes]) -> Separation | TenantToSalt:
        """Returns what becomes of a request by its headers, or whose salt its body is to get.

        named: the values of the header that names the tenant.
        """
        head = request.head
        if has_empty_segment(head.path):  # a server that merges slashes would take another path
            return Separation(IsolationOutcome.API, unsalted_api(head.path))
        responses = responses_in(head.path)
        if not responses and (
            not may_compute(head.method, head.path) or request.reason == "no_body"
        ):
            return Separation(None)
        unnamed = self._unnamed(named)
        if unnamed is not None:
            return Separation(unnamed, refused_tenant(head.path))
        tenant = named[0] if named else None
        if responses:
            is_own = all(self._ids.is_own(tenant, one) for one in responses)
            return Separation(None) if is_own else _of_another(head.path)
        is_known = request.reason != NOT_INFERENCE and head.path not in grpc_request.PATHS
        if request.wants_endpoint or not is_known:
            return Separation(IsolationOutcome.API, unsalted_api(head.path))
        return TenantToSalt(tenant, self._unread_on(head.path))

    def _unnamed(self, named: Sequence[bytes]) -> IsolationOutcome | None:
        """Returns why the values of the header name no tenant, None if they do or need not."""
        if len(set(named)) > 1:
            return IsolationOutcome.SEVERAL_TENANTS
        return IsolationOutcome.NO_TENANT if not named and self._refuses_unnamed else None

    def _unread_on(self, path: str) -> Collection[str]:
        """Returns the models whose workers might read no salt on a path where vLLM does.

        A worker whose engine is not known counts as the others of its model: else each new one
        would have requests refused until it is asked.
        """
        if path in SGLANG_PATHS or path not in PATHS:
            return ()
        return [name for name in self._names if set(self._engines_of(name)) != {VLLM}]

    def write(self, draft: Draft, path: str, whose: TenantToSalt) -> Separation:
        """Gives a body the salt of its tenant; its refusal says why that cannot be.

        It looks at nothing that another thread may change.
        """
        tenant, unread = whose
        if path == RESPONSES_PATH and not self._ids.name(draft, tenant):
            return _of_another(path)
        said = salting_of(draft)
        if self._is_shared(said):
            return Separation(IsolationOutcome.SHARED)
        if path not in PATHS or (unread and self._model_of(said) in unread):
            return Separation(IsolationOutcome.API, unsalted_api(path))
        if names_media(draft):
            return Separation(IsolationOutcome.MEDIA, refused_media(path))
        salt = self._maker.salt(tenant, said.own)
        write_salt(draft, salt)
        outcome = IsolationOutcome.COMMON if tenant is None else IsolationOutcome.SALTED
        return Separation(outcome, None, Tenant(tenant or b"", salt if said.own is None else ""))

    def _model_of(self, said: Salting) -> str:
        """Returns the model whose workers get a body: the first one if it names no known one."""
        served = self._models.find(said.model)
        return self._names[0] if served is None else served.model

    def _is_shared(self, said: Salting) -> bool:
        """Returns whether all tenants share the blocks of the model that a body names."""
        served = self._models.find(said.model)
        return served is not None and served.model in self._shared


def _of_another(path: str) -> Separation:
    """Returns the refusal of a request for a response that is not this tenant's."""
    return Separation(IsolationOutcome.RESPONSE, refused_response(path))


def unsalted(path: str, why: Unclear) -> tuple[IsolationOutcome, Refusal]:
    """Returns the refusal of a request whose body is not read with certainty, as it is counted."""
    if path not in PATHS:
        return IsolationOutcome.API, unsalted_api(path)
    if why in (Unclear.UNREAD, Unclear.TOO_LARGE):
        return IsolationOutcome.UNREAD, unread_body(path)
    return IsolationOutcome.BODY, refused_body(path)
