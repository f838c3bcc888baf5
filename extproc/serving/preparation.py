"""Prepares requests: cleans them, finds their class, and writes their tenant's salt.

A request and an explanation of it are prepared by the same steps, in the same order.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from extproc.base.secret_file import secret_in
from extproc.config.schema import Config
from extproc.requests.request import Ask
from extproc.requests.tenant_salt import Tenant
from extproc.serving.classes import ClassStep
from extproc.serving.cleaning import Cleaning
from extproc.serving.refusals import Refusal, refused_body
from extproc.serving.tenants import Isolated, Tenants

# All values of the trusted headers, by their names in lower case.
Named = Mapping[str, Sequence[bytes]]
NOTHING_NAMED: Named = {}


class Prepared(NamedTuple):
    """A request as its worker is to get it, or the answer that refuses it.

    isolated: what became of its tenant, None if that is not looked at. is_unclean: whether it is
    refused because its body may hide fields that only the router may write.
    """

    step: Ask | Refusal
    isolated: Isolated | None = None
    is_unclean: bool = False


class Preparation:
    """Prepares requests as a configuration says.

    headers: the names of the trusted ones, in lower case. is_needed: whether there is any step.
    reads_bodies: whether there is one that needs the bodies.
    """

    def __init__(self, config: Config, engines_of: Callable[[str], Collection[str]]) -> None:
        """Reads the secret of the tenants' salts, if they are kept apart.

        engines_of: returns the names of the engines that a model's workers are known to run.

        Raises:
            StartError: the file with the secret cannot be read.
        """
        classes = config.policy.classes
        self._cleaning = Cleaning() if _cleans(config) else None
        self._classes = None if classes is None else ClassStep(classes)
        self._tenants = _tenants(config, engines_of)
        steps = (self._tenants, self._classes)
        self.headers = [one.header for one in steps if one is not None]
        self._recorded = _recorded_header(config)
        if self._recorded:
            self.headers.append(self._recorded)
        self.reads_bodies = any((self._cleaning, *steps))
        self.is_needed = self.reads_bodies or bool(self._recorded)

    async def prepare(self, ask: Ask, named: Named) -> Prepared:
        """Returns what becomes of a request.

        It yields None before it waits, as `Router.route` does.
        """
        if self._cleaning is not None:
            cleaned = await _cleaned(self._cleaning, ask)
            if cleaned is None:
                return Prepared(refused_body(ask.head.path), is_unclean=True)
            ask = cleaned
        if self._classes is not None:
            ask = await self._classes.classify(ask, named.get(self._classes.header, ()))
        if self._recorded:
            values = {*named.get(self._recorded, ())}
            name = values.pop() if len(values) == 1 else b""
            ask = msgspec.structs.replace(ask, tenant=Tenant(name))
        if self._tenants is None:
            return Prepared(ask)
        outcome, step = await self._tenants.separate(ask, named.get(self._tenants.header, ()))
        return Prepared(step, outcome)


def _cleans(config: Config) -> bool:
    """Returns whether clients may not say from where blocks come: so a tenant reaches others'."""
    rules = config.disaggregation
    return rules.mode is not None or rules.changes_bodies or config.isolation is not None


def _recorded_header(config: Config) -> str:
    """Returns the header that names the tenants of a recording, "" if none does."""
    rules = config.recorder
    if rules.file is None or rules.tenant_header is None or config.isolation is not None:
        return ""
    return rules.tenant_header.lower()


def _tenants(config: Config, engines_of: Callable[[str], Collection[str]]) -> Tenants | None:
    rules = config.isolation
    if rules is None:
        return None
    secret = secret_in("isolation.secret_file", rules.secret_file)
    return Tenants(rules, config.models, secret, engines_of)


async def _cleaned(cleaning: Cleaning, ask: Ask) -> Ask | None:
    """Returns a request without the fields that only the router may write; None to refuse it.

    Nothing is removed in dialect B, where no body is changed.
    """
    body = ask.body
    if body is None or ask.wants_endpoint:
        return ask
    cleaned = await cleaning.clean(ask.head.path, body)
    if cleaned is None or cleaned is body:
        return ask if cleaned is body else None
    return msgspec.structs.replace(ask, body=cleaned)
