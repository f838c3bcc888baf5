"""Workers from DNS: the addresses of a name, looked up again as its answers expire."""

import asyncio
import ipaddress
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import dns.asyncresolver
import dns.exception
import dns.rdatatype
import dns.resolver

from extproc.base import address
from extproc.base.address import Address
from extproc.config.schema import DnsName, FoundWorker
from extproc.fleet.discovery.view import Sighting, SourceReport, worker_at

# Most names of an SRV record that are looked up at the same time.
AT_ONCE = 32

# Noted if an answer has some of them. Clouds serve credentials at link-local addresses.
LEFT_OUT = "addresses that are link-local, multicast, reserved or unspecified are left out"


@dataclass(frozen=True, slots=True)
class LookupLimits:
    """How long lookups take, and how much they bring.

    lookup_seconds: for one lookup, over all servers and tries. least_seconds: the shortest pause
    between two lookups, even if a zone allows no caching. max_places: most workers of one name.
    """

    lookup_seconds: float = 5.0
    least_seconds: float = 1.0
    max_places: int = 4_096


USUAL = LookupLimits()

_Answer = tuple[list[tuple[str, int]], float]  # hosts and ports, time to live in seconds


class _NoAddressError(Exception):
    """A name does not exist, or has no address."""


class _TooManyError(Exception):
    """A name has more addresses than are accepted; says so."""


def _resolver(nameserver: str | None) -> dns.asyncresolver.Resolver:
    if nameserver is None:
        return dns.asyncresolver.Resolver()
    place = address.parse(nameserver)
    resolver = dns.asyncresolver.Resolver(configure=False)
    resolver.nameservers = [place.host]
    resolver.port = place.port
    return resolver


class DnsNames:
    """Looks one name up: its A records, its AAAA records if it has no A, or its SRV records.

    Only one address family is used, as in Envoy's own clusters, so that a worker with two addresses
    is one worker. A name that vanishes is a fault, and its last addresses stay.
    """

    def __init__(
        self,
        options: DnsName,
        limits: LookupLimits = USUAL,
        make_resolver: Callable[[str | None], dns.asyncresolver.Resolver] = _resolver,
    ) -> None:
        self._make_resolver = make_resolver
        self.name = f"dns:{options.name}"
        self._limits = limits
        self._options = options

    async def run(self, report: SourceReport) -> None:
        """Looks the name up again and again until it is cancelled."""
        try:
            resolver = await asyncio.to_thread(self._make_resolver, self._options.nameserver)
        except (dns.exception.DNSException, OSError) as error:
            report.fault(f"{self._options.name}: no name server is known: {_words(error)}")
            return  # `Discovery` restarts it
        interval = self._options.interval_ms / 1000
        while True:
            pause = interval
            try:
                places, lifetime = await self._places(resolver)
                usable = [place for place in places if _may_be_a_worker(place[0])]
                if not usable:
                    raise _NoAddressError(self._options.name)
                note = f"{self._options.name}: {LEFT_OUT}" if len(usable) < len(places) else ""
                report.view(_workers_at(usable, self._options.worker), note)
                pause = min(interval, max(self._limits.least_seconds, lifetime))
            except _NoAddressError as error:
                report.fault(f"{error} has no address now")
            except _TooManyError as error:
                report.fault(str(error))
            except (dns.exception.DNSException, OSError) as error:
                report.fault(f"{self._options.name}: lookup failed: {_words(error)}")
            await asyncio.sleep(pause)

    async def _places(self, resolver: dns.asyncresolver.Resolver) -> _Answer:
        if not self._options.srv:
            hosts, lifetime = await self._addresses(resolver, self._options.name)
            self._refuse_more(len(hosts))
            return [(host, self._options.worker.port) for host in hosts], lifetime
        answer = await self._lookup(resolver, self._options.name, dns.rdatatype.SRV)
        if answer is None:
            raise _NoAddressError(self._options.name)
        # a target of "." says that the service is not there (RFC 2782)
        targets = [(one.target.to_text(), one.port) for one in answer if len(one.target.labels) > 1]
        if not targets:
            raise _NoAddressError(self._options.name)
        self._refuse_more(len(targets))
        places: list[tuple[str, int]] = []
        lifetimes = [float(answer.rrset.ttl if answer.rrset else 0)]
        for start in range(0, len(targets), AT_ONCE):
            some = targets[start : start + AT_ONCE]
            found = await asyncio.gather(*(self._addresses(resolver, target) for target, _ in some))
            for (_, port), (hosts, lifetime) in zip(some, found, strict=True):
                places += [(host, port) for host in hosts]
                lifetimes.append(lifetime)
            self._refuse_more(len(places))
        return places, min(lifetimes)

    def _refuse_more(self, count: int) -> None:
        """Refuses an answer with more than `LookupLimits.max_places`; the last addresses stay.

        Raises:
            _TooManyError: it has more.
        """
        most = self._limits.max_places
        if count > most:
            raise _TooManyError(f"{self._options.name} has more than {most} addresses")

    async def _addresses(
        self, resolver: dns.asyncresolver.Resolver, name: str
    ) -> tuple[list[str], float]:
        for kind in (dns.rdatatype.A, dns.rdatatype.AAAA):
            answer = await self._lookup(resolver, name, kind)
            if answer is not None and answer.rrset:
                return sorted(one.to_text() for one in answer), float(answer.rrset.ttl)
        raise _NoAddressError(name)

    async def _lookup(
        self, resolver: dns.asyncresolver.Resolver, name: str, kind: dns.rdatatype.RdataType
    ) -> dns.resolver.Answer | None:
        """Returns the records of a kind, None if the name has none; raises on other failures."""
        try:
            answer = await resolver.resolve(
                name,
                kind,
                raise_on_no_answer=False,
                lifetime=self._limits.lookup_seconds,
                search=True,
            )
        except dns.resolver.NXDOMAIN:
            return None
        return answer if answer.rrset else None


def _may_be_a_worker(host: str) -> bool:
    one = ipaddress.ip_address(host)
    one = getattr(one, "ipv4_mapped", None) or one
    is_reserved = one.version == 4 and one.is_reserved
    return not (one.is_link_local or one.is_multicast or one.is_unspecified or is_reserved)


def _workers_at(places: Iterable[tuple[str, int]], worker: FoundWorker) -> tuple[Sighting, ...]:
    canonical = sorted({str(address.parse(str(Address(host, port)))) for host, port in places})
    parsed = [address.parse(one) for one in canonical]
    return tuple(Sighting(worker_at(place.host, place.port, worker)) for place in parsed)


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
