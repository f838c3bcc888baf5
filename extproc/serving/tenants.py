"""Keeps the tenants' caches apart: gives each request the salt of its tenant, or refuses it.

A request that a model would answer without a salt is refused: its blocks would be shared with
everybody. So are POST requests to paths that are not known: a newer engine may compute there.
"""

import asyncio
import secrets
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import NamedTuple

import msgspec

from extproc.base.engine import VLLM
from extproc.config.schema import Model
from extproc.config.sections import REFUSE, Isolation
from extproc.requests.named_media import names_media
from extproc.requests.request import Ask, Models, may_compute
from extproc.requests.response_ids import RESPONSES_PATH, ResponseIds, response_in
from extproc.requests.tenant_salt import (
    PATHS,
    SGLANG_PATHS,
    Salting,
    SaltMaker,
    Tenant,
    salting_of,
    with_salt,
)
from extproc.serving.refusals import (
    Refusal,
    refused_body,
    refused_media,
    refused_response,
    refused_tenant,
    unread_body,
    unsalted_api,
)

# A body of this size is scanned and copied within a millisecond.
INLINE_BYTES = 131_072


class Isolated(StrEnum):
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


class Separated(NamedTuple):
    """What became of a request: what is counted, None if it calls no model, and what follows."""

    outcome: Isolated | None
    step: Ask | Refusal


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
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="salting")

    async def separate(self, ask: Ask, named: Sequence[bytes]) -> Separated:
        """Returns a request with the salt of its tenant, or why it is refused.

        named: the values of the header that names the tenant. It yields None before it waits, as
        `Router.route` does.
        """
        head = ask.head
        response = response_in(head.path)
        if not response and (not may_compute(head.method, head.path) or ask.reason == "no_body"):
            return Separated(None, ask)
        if len(set(named)) > 1:
            return Separated(Isolated.SEVERAL_TENANTS, refused_tenant(head.path))
        if not named and self._refuses_unnamed:
            return Separated(Isolated.NO_TENANT, refused_tenant(head.path))
        tenant = named[0] if named else None
        if response:
            is_own = self._ids.is_own(tenant, response)
            return Separated(None, ask) if is_own else _of_another(head.path)
        return await self._salt(ask, tenant)

    async def _salt(self, ask: Ask, tenant: bytes | None) -> Separated:
        body = ask.body
        if body is None or ask.wants_endpoint:
            return _unsalted(ask)
        unread = self._unread_on(ask.head.path)  # here, since a thread must not look at workers
        if len(body) > INLINE_BYTES:
            await asyncio.sleep(0)  # from here on, it must run in a task
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, self._salted, ask, body, tenant, unread)
        return self._salted(ask, body, tenant, unread)

    def _unread_on(self, path: str) -> Collection[str]:
        """Returns the models whose workers might read no salt on a path where vLLM does.

        A worker whose engine is not known counts as the others of its model: else each new one
        would have requests refused until it is asked.
        """
        if path in SGLANG_PATHS or path not in PATHS:
            return ()
        return [name for name in self._names if set(self._engines_of(name)) != {VLLM}]

    def _salted(
        self, ask: Ask, body: bytes, tenant: bytes | None, unread: Collection[str]
    ) -> Separated:
        path = ask.head.path
        if path == RESPONSES_PATH:
            named = self._ids.name(body, tenant)
            if named is None:
                return _of_another(path)
            body, ask = named, msgspec.structs.replace(ask, body=named)
        said = salting_of(body)
        if said is not None and self._is_shared(said):
            return Separated(Isolated.SHARED, ask)
        if path not in PATHS or (unread and self._model_of(said) in unread):
            return Separated(Isolated.API, unsalted_api(path))
        if said is not None and names_media(path, body):
            return Separated(Isolated.MEDIA, refused_media(path))
        salt = "" if said is None else self._maker.salt(tenant, said.own)
        salted = None if said is None else with_salt(body, said, salt)
        if salted is None:
            return Separated(Isolated.BODY, refused_body(path))
        outcome = Isolated.COMMON if tenant is None else Isolated.SALTED
        whose = Tenant(tenant or b"", salt if said is not None and said.own is None else "")
        return Separated(outcome, msgspec.structs.replace(ask, body=salted, tenant=whose))

    def _model_of(self, said: Salting | None) -> str:
        """Returns the model whose workers get a body: the first one if it names no known one."""
        served = None if said is None else self._models.find(said.model)
        return self._names[0] if served is None else served.model

    def _is_shared(self, said: Salting) -> bool:
        """Returns whether all tenants share the blocks of the model that a body names."""
        served = self._models.find(said.model)
        return served is not None and served.model in self._shared


def _of_another(path: str) -> Separated:
    """Returns the refusal of a request for a response that is not this tenant's."""
    return Separated(Isolated.RESPONSE, refused_response(path))


def _unsalted(ask: Ask) -> Separated:
    """Returns the refusal of a request whose body is not here, or that the proxy streams."""
    path = ask.head.path
    if ask.wants_endpoint or path not in PATHS:
        return Separated(Isolated.API, unsalted_api(path))
    return Separated(Isolated.UNREAD, unread_body(path))
