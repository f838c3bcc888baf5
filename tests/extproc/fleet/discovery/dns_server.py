"""A small DNS server on loopback."""

import asyncio
import contextlib
import typing
from collections.abc import AsyncIterator

import dns.flags
import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset


class DnsServer(asyncio.DatagramProtocol):
    """Answers from `records`: texts by name and type; other names do not exist.

    rcode: the code that it answers instead. is_silent: it does not answer. ttl: in seconds.
    """

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.rcode: dns.rcode.Rcode | None = None
        self.is_silent = False
        self.ttl = 1
        self.asked = 0
        self.address = ""
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # asyncio's own transport is no DatagramTransport before Python 3.12
        self._transport = typing.cast("asyncio.DatagramTransport", transport)
        host, port = transport.get_extra_info("sockname")
        self.address = f"{host}:{port}"

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        self.asked += 1
        if self.is_silent or self._transport is None:
            return
        self._transport.sendto(self._answer(dns.message.from_wire(data)).to_wire(), addr)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def _answer(self, query: dns.message.Message) -> dns.message.Message:
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.RA
        (question,) = query.question
        name = question.name.to_text(omit_final_dot=True)
        kind = dns.rdatatype.to_text(question.rdtype)
        texts = self.records.get((name, kind))
        if self.rcode is not None:
            answer.set_rcode(self.rcode)
        elif (name, "CNAME") in self.records:
            self._add_chain(answer, name, kind)
        elif texts:
            answer.answer.append(dns.rrset.from_text(question.name, self.ttl, "IN", kind, *texts))
        elif not any(known == name for known, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        return answer

    def _add_chain(self, answer: dns.message.Message, name: str, kind: str) -> None:
        """Adds aliases until one is added already, and what the last one has."""
        added: set[str] = set()
        while (alias := self.records.get((name, "CNAME"))) and name not in added:
            added.add(name)
            answer.answer.append(dns.rrset.from_text(f"{name}.", self.ttl, "IN", "CNAME", *alias))
            name = alias[0].rstrip(".")
        if texts := self.records.get((name, kind)):
            answer.answer.append(dns.rrset.from_text(f"{name}.", self.ttl, "IN", kind, *texts))


@contextlib.asynccontextmanager
async def dns_server() -> AsyncIterator[DnsServer]:
    loop = asyncio.get_running_loop()
    _, server = await loop.create_datagram_endpoint(DnsServer, local_addr=("127.0.0.1", 0))
    yield server
    server.close()
    await asyncio.sleep(0)
