"""Prepares requests: finds their class and tenant, and edits their bodies as `requests.edits` says.

A request and an explanation of it are prepared by the same steps, in the same order.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import msgspec

from extproc.base.engine import Engine
from extproc.base.errors import UnclearError
from extproc.base.headers import FORWARDED
from extproc.base.secret_file import secret_in
from extproc.config.policies import header_keys
from extproc.config.schema import Config, Policy
from extproc.features.classes.classes import is_told_by_header
from extproc.features.hooks import Hooks
from extproc.requests import edits, grpc_request, reserved_grpc_fields
from extproc.requests.draft import Draft, Unclear
from extproc.requests.edits import Duties
from extproc.requests.refusals import Refusal, crowded_out, refused_body, unread_body
from extproc.requests.request import RoutingRequest, may_compute
from extproc.requests.trusted_headers import TrustedHeaders
from extproc.serving.tenants import IsolationOutcome, Separation, Tenants, TenantToSalt, unsalted
from extproc.serving.turns import CROWDED, Turns

# A body of this size is edited within a millisecond, whatever it holds.
INLINE_BYTES = 131_072

# Why a message of gRPC is refused; the other reasons are `Unclear`'s.
UNCLEAR_MESSAGE = "grpc_message"
REASONS = (*Unclear, UNCLEAR_MESSAGE, CROWDED)


class PreparedRequest(NamedTuple):
    """A request as its worker is to get it, or the answer that refuses it.

    isolated: what became of its tenant, None if that is not looked at. unclear: one of `REASONS` if
    it is refused since its body may have what only the router may write, else "".
    """

    step: RoutingRequest | Refusal
    isolated: IsolationOutcome | None = None
    unclear: str = ""


class KnownEngines(NamedTuple):
    """What preparing needs to know of the workers.

    engines_of: returns the names of the engines that a model's workers are known to run. engines:
    returns the engine of each worker, None for one that is not known.
    """

    engines_of: Callable[[str], Collection[str]]
    engines: Callable[[], Collection[Engine | None]]


class Preparation:
    """Prepares requests as a configuration says.

    headers: the names of the trusted ones, in lower case. is_needed: whether there is any step.
    reads_bodies: whether there is one that needs the bodies.
    """

    def __init__(self, config: Config, fleet: KnownEngines, hooks: Hooks) -> None:
        """Reads the secret of the tenants' salts, if they are kept apart.

        Raises:
            StartError: the file with the secret cannot be read.
        """
        self._hooks = hooks
        self._has_classes = config.policy.classes is not None
        self._tenants = _tenants(config, fleet.engines_of)
        self._fleet = fleet
        self._transfers = _takes_transfers(config)
        self._policy_headers = _policy_headers(config.policy)
        self._hops = config.envoy.trusted_hops
        self._turns = Turns()
        self.headers = [] if self._tenants is None else [self._tenants.header]
        self.headers += [*hooks.headers, *self._policy_headers.values()]
        self.reads_bodies = config.edits_bodies
        self.is_needed = self.reads_bodies or bool(hooks.describe or self._policy_headers)
        if self.reads_bodies and self._tenants is None:
            self.headers.append(FORWARDED)

    async def prepare(self, request: RoutingRequest, named: TrustedHeaders) -> PreparedRequest:
        """Returns what becomes of a request.

        It yields None before it waits, as `Router.route` does.
        """
        request = self._described(request, named)
        if self.reads_bodies:
            request = msgspec.structs.replace(request, whose=self._client(named))
        whose: TenantToSalt | None = None
        if self._tenants is not None:
            seen = self._tenants.admit(request, named.get(self._tenants.header, ()))
            if isinstance(seen, TenantToSalt):
                whose = seen
            elif seen.refusal is not None:
                return PreparedRequest(seen.refusal, seen.outcome)
        duties = self._duties(request, whose)
        if not any(duties):
            return PreparedRequest(request)
        if request.body is None:
            is_unread = request.is_unread or whose is not None
            return (
                self._unclear(request, Unclear.UNREAD, duties)
                if is_unread
                else PreparedRequest(request)
            )
        job = partial(self._edited, request, request.body, duties, whose)
        if len(request.body) <= INLINE_BYTES:
            return job()
        await asyncio.sleep(0)  # from here on, it must run in a task
        try:
            return await self._turns.run(request.whose or b"", len(request.body), job)
        except UnclearError:
            return PreparedRequest(crowded_out(request.head.path), None, CROWDED)

    def _described(self, request: RoutingRequest, named: TrustedHeaders) -> RoutingRequest:
        """Returns a request with what features say of it, and what policies read."""
        for describe in self._hooks.describe:
            request = describe(request, named)
        if self._policy_headers:
            names = self._policy_headers.items()
            read = {key: b",".join(named.get(name, ())) for key, name in names}
            request = msgspec.structs.replace(request, policy_headers=read)
        return request

    def _duties(self, request: RoutingRequest, whose: TenantToSalt | None) -> Duties:
        """Returns what changes a body. In dialect B no body is changed."""
        if request.wants_endpoint:
            return Duties()
        computes = may_compute(request.head.method, request.head.path)
        classes = self._has_classes and computes
        is_read = request.body is not None or computes
        return Duties(whose is not None, classes, self._transfers and is_read)

    def _client(self, named: TrustedHeaders) -> bytes:
        """Returns who has to wait behind whom: the tenant, or the address that the proxy saw."""
        if self._tenants is not None:
            return b",".join(named.get(self._tenants.header, ()))
        return forwarded_for(named.get(FORWARDED, ()), self._hops)

    def _edited(
        self, request: RoutingRequest, body: bytes, duties: Duties, whose: TenantToSalt | None
    ) -> PreparedRequest:
        """Returns a request with its body edited, or refused; it may run in another thread."""
        path = request.head.path
        if path in grpc_request.PATHS:
            return _edited_message(request, body) if duties.transfers else PreparedRequest(request)
        try:
            draft = edits.drafted(body, path, duties)
            kept = Separation(None) if whose is None else self._written(draft, path, whose)
        except UnclearError as error:
            return self._unclear(request, Unclear(error.reason), duties)
        if kept.refusal is not None:
            return PreparedRequest(kept.refusal, kept.outcome)
        new = draft.written()
        if new is body and kept.tenant is None:
            return PreparedRequest(request, kept.outcome)
        tenant = request.tenant if kept.tenant is None else kept.tenant
        return PreparedRequest(
            msgspec.structs.replace(request, body=new, tenant=tenant), kept.outcome
        )

    def _written(self, draft: Draft, path: str, whose: TenantToSalt) -> Separation:
        if self._tenants is None:
            raise RuntimeError("there are no tenants")
        return self._tenants.write(draft, path, whose)

    def _unclear(self, request: RoutingRequest, why: Unclear, duties: Duties) -> PreparedRequest:
        """Returns what becomes of a request whose body is not read with certainty."""
        path = request.head.path
        if duties.tenants:
            return _unsalted(path, why)
        if duties.classes and is_told_by_header(self._fleet.engines(), path):
            duties = duties._replace(classes=False)
        if not edits.must_refuse(why, request.body, duties):
            return PreparedRequest(request)
        is_long = why in (Unclear.UNREAD, Unclear.TOO_LARGE)
        return PreparedRequest((unread_body if is_long else refused_body)(path), None, why.value)


def forwarded_for(values: Sequence[bytes], hops: int) -> bytes:
    """Returns the client's address in x-forwarded-for, b"" without one.

    Each proxy appends the address of its other end. What is before the client's, clients may have
    written themselves.

    hops: how many of the last addresses are of proxies.
    """
    last = b",".join(values).rsplit(b",", hops + 1)[-hops - 1 :]
    return last[0].strip()


def _unsalted(path: str, why: Unclear) -> PreparedRequest:
    outcome, refusal = unsalted(path, why)
    return PreparedRequest(refusal, outcome, "" if outcome is IsolationOutcome.API else why.value)


def _edited_message(request: RoutingRequest, body: bytes) -> PreparedRequest:
    """Returns a request of gRPC without the fields that only the router may write."""
    new = reserved_grpc_fields.without_reserved(request.head.path, body)
    if new is None:
        return PreparedRequest(refused_body(request.head.path), None, UNCLEAR_MESSAGE)
    return PreparedRequest(request if new is body else msgspec.structs.replace(request, body=new))


def _takes_transfers(config: Config) -> bool:
    """Returns whether clients may not say from where blocks come: so a tenant reaches others'."""
    rules = config.disaggregation
    return rules.mode is not None or rules.changes_bodies or config.isolation is not None


def _policy_headers(rules: Policy) -> Mapping[str, str]:
    """Returns the headers that policies read, in lower case, by the keys that name them."""
    named = {key: attrgetter(key)(rules) for key in header_keys()}
    return {key: name.lower() for key, name in named.items() if name is not None}


def _tenants(config: Config, engines_of: Callable[[str], Collection[str]]) -> Tenants | None:
    rules = config.isolation
    if rules is None:
        return None
    secret = secret_in("isolation.secret_file", rules.secret_file)
    return Tenants(rules, config.models, secret, engines_of)
