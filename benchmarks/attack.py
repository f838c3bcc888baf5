"""One tenant that attacks with large bodies, and what the other tenants notice of it.

    python benchmarks/attack.py [--quick | --smoke] [--only FEATURE ...] [--json FILE]

A real Envoy with what `kvsteer envoy` prints, a router, and a worker. The other tenant sends 20
small requests a second and two of 200 KB; the attacker sends one kind of body after the other, then
all in turn. All is measured in one run for each feature: before, during and after; times have the
mean of before and after as their reference. The last two show how much of the times is Envoy's own:
with "empty server" it asks a gRPC server that looks into no message, instead of the router; with
"no router" it collects the bodies and asks nobody. Envoy fails open, so that a request of the other
tenant that the router answers too late counts twice: as late, and with isolation as unsalted.
Counts depend little on how fast the machine is; the goals of times are for two quiet cores.
"""

import asyncio
import contextlib
import dataclasses
import json
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from attack_side import ATTACKS, GOOD, PATH, TEXT, UNSALTED_PATH, Attack, headers_of
from attack_side import running as running_side
from measure import NO_REFERENCE, CannotRunError, Figure, Goal, Row
from rows import Run, arguments, run

from extproc.config.schema import Config
from extproc.envoy.envoy_config import FILTER, render
from tests.ports import free_port
from tests.system.system import running
from tests.waiting import until

LARGE_BYTES = 200_000
SMALL_SECONDS, LARGE_SECONDS = 0.05, 0.5
MESSAGE_TIMEOUT_MS, DEADLINE_MS = 500, 250
GOALS_MS = {"small": 50, "200 KB": 100}
MAX_RESIDENT_MIB = 400
OK = 200

_CLASSES = {
    "header": "x-class",
    "default": "people",
    "of": [{"name": "people"}, {"name": "batch", "priority": 10}],
}
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "isolation": {"isolation": {"header": "x-tenant", "fail": "open"}},
    "classes": {"policy": {"classes": _CLASSES}},
    "pulls": {"disaggregation": {"connector": "offloading", "min_pulled_tokens": 64}},
    "none of them": {},
}
EMPTY, WITHOUT_ROUTER = "empty server", "no router"

SMALL = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}).encode()
LARGE = Attack(LARGE_BYTES, b"{" + TEXT[0], *TEXT[1:], every=0.0).body()


def _by_size() -> dict[str, list[float]]:
    return {size: [] for size in GOALS_MS}


@dataclass
class Noticed:
    """What the other tenant noticed in a while. seconds: of its requests, by their size."""

    seconds: Mapping[str, list[float]] = field(
        default_factory=lambda: {one: [] for one in GOALS_MS}
    )
    unsalted: int = 0
    lost: int = 0

    @property
    def sent(self) -> int:
        """How many requests it sent."""
        return sum(map(len, self.seconds.values()))

    @property
    def late(self) -> int:
        """How many took longer than Envoy waits for the router."""
        limit = MESSAGE_TIMEOUT_MS / 1000
        return sum(one > limit for each in self.seconds.values() for one in each)

    def p99_ms(self, size: str) -> float:
        """Returns the time within which 99 of 100 requests of a size were answered."""
        ordered = sorted(self.seconds[size])
        return 1000 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


class OtherTenant:
    """Sends requests through Envoy at an even pace, however long the answers take."""

    def __init__(self, envoy: str, worker: str, session: aiohttp.ClientSession) -> None:
        self._url = f"{envoy}{PATH}"
        self._worker = worker
        self._session = session

    async def _unsalted(self) -> int:
        """Returns how many of its requests reached the worker without a salt, so far."""
        async with self._session.get(f"http://{self._worker}{UNSALTED_PATH}") as answer:
            return int(await answer.text())

    async def notices(self, seconds: float) -> Noticed:
        """Returns what it notices in so many seconds."""
        noticed, before = Noticed(), await self._unsalted()
        async with asyncio.TaskGroup() as group:
            for size, body, every in (
                ("small", SMALL, SMALL_SECONDS),
                ("200 KB", LARGE, LARGE_SECONDS),
            ):
                group.create_task(self._repeat(size, body, every, seconds, noticed))
        noticed.unsalted = await self._unsalted() - before
        return noticed

    async def _repeat(
        self, size: str, body: bytes, every: float, seconds: float, noticed: Noticed
    ) -> None:
        ends = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            while time.monotonic() < ends:
                group.create_task(self._send(size, body, noticed))
                await asyncio.sleep(every)

    async def _send(self, size: str, body: bytes, noticed: Noticed) -> None:
        began = time.monotonic()
        noticed.lost += await self.status(body) != OK
        noticed.seconds[size].append(time.monotonic() - began)

    async def status(self, body: bytes = SMALL) -> int:
        """Sends a request; returns its status, 0 if it got none."""
        try:
            async with self._session.post(self._url, data=body, headers=headers_of(GOOD)) as answer:
                await answer.read()
                return answer.status
        except aiohttp.ClientError:
            return 0

    async def is_answered(self) -> bool:
        """Returns whether a request is answered."""
        return await self.status() == OK


def _resident_mib(pid: int) -> float:
    """Returns the most memory that a process had resident."""
    status = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


@dataclass
class Siege:
    """A router behind Envoy, the tenant that it has to serve, and where it is attacked."""

    feature: str
    envoy: str
    pid: int
    other: OtherTenant

    async def rows(self, seconds: float) -> list[Row]:
        """Attacks it, and returns what was measured."""
        before = await self.other.notices(seconds)
        attacks = {name: [name] for name in ATTACKS} | {"all in turn": [*ATTACKS]}
        during: dict[str, Noticed] = {}
        for name, names in attacks.items():
            with running_side("attack", self.envoy.removeprefix("http://"), *names):
                during[name] = await self.other.notices(seconds)
        after = await self.other.notices(seconds)
        rows: list[Row] = []
        for name, noticed in {"before": before, **during, "after": after}.items():
            rows += self._rows(name, noticed, (before, after))
        if self.feature in (EMPTY, WITHOUT_ROUTER):
            return [dataclasses.replace(row, goal=None) for row in rows]
        peak = Figure([_resident_mib(self.pid)])
        goal = Goal(MAX_RESIDENT_MIB, f"<= {MAX_RESIDENT_MIB} MiB", of_ratio=False)
        return [
            *rows,
            Row(f"{self.feature}, the router's peak memory (MiB)", peak, NO_REFERENCE, goal),
        ]

    def _rows(self, name: str, noticed: Noticed, quiet: Sequence[Noticed]) -> Iterator[Row]:
        is_quiet = noticed in quiet
        counts = {"failed": noticed.lost, "late": noticed.late}
        if self.feature == "isolation":
            counts["unsalted"] = noticed.unsalted
        for what, count in counts.items():
            label = f"{self.feature}, {name}: {what} of {noticed.sent}"
            yield Row(label, Figure([count]), NO_REFERENCE, Goal(0, "0", of_ratio=False))
        for size, limit in GOALS_MS.items():
            goal = None if is_quiet else Goal(limit, f"<= {limit} ms", of_ratio=False)
            reference = Figure([sum(one.p99_ms(size) for one in quiet) / len(quiet)])
            ours = Figure([noticed.p99_ms(size)])
            yield Row(f"{self.feature}, {name}: {size} p99 (ms)", ours, reference, goal)


def _sections(feature: str, folder: Path) -> dict[str, Any]:
    secret = folder / "secret"
    secret.write_bytes(bytes(range(16)))
    sections = {
        "extproc": {"deadline_ms": DEADLINE_MS},
        "envoy": {"message_timeout_ms": MESSAGE_TIMEOUT_MS},
        **FEATURES.get(feature, {}),
    }
    if "isolation" in sections:
        sections["isolation"] = {**sections["isolation"], "secret_file": str(secret)}
    return sections


def _collecting(config: Config) -> str:
    """Returns the configuration of an Envoy that collects bodies and asks no router."""
    collect = {
        "name": "envoy.filters.http.buffer",
        "typed_config": {
            "@type": "type.googleapis.com/envoy.extensions.filters.http.buffer.v3.Buffer",
            "max_request_bytes": config.extproc.max_body_bytes,
        },
    }
    written = yaml.safe_load(render(config))
    for listener in written["static_resources"]["listeners"]:
        for chain in listener["filter_chains"]:
            for manager in chain["filters"]:
                filters = manager["typed_config"]["http_filters"]
                manager["typed_config"]["http_filters"] = [
                    collect if one["name"] == FILTER else one for one in filters
                ]
    return yaml.safe_dump(written)


@contextlib.asynccontextmanager
async def _besieged(feature: str) -> AsyncIterator[Siege]:
    address, empty = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    with (
        tempfile.TemporaryDirectory() as folder,
        running_side("worker", address),
        running_side("empty", empty) if feature == EMPTY else contextlib.nullcontext(),
    ):
        sections = _sections(feature, Path(folder))
        if feature == EMPTY:
            sections["envoy"]["router"] = empty
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            running(
                1,
                changes=sections,
                envoy_config=_collecting if feature == WITHOUT_ROUTER else render,
                proxied=lambda _: address,
            ) as system,
            aiohttp.ClientSession(connector=connector) as session,
        ):
            if system.router is None:
                raise CannotRunError("the router did not start")
            other = OtherTenant(system.envoy, address, session)
            await until(other.is_answered, "requests are answered")
            yield Siege(feature, system.envoy, system.router.pid, other)


async def _measured(feature: str, seconds: float) -> list[Row]:
    async with _besieged(feature) as siege:
        return await siege.rows(seconds)


def main(one: Run) -> None:
    """Measures all rows."""
    seconds = one.amount(1.5, 6.0, 12.0)
    for feature in one.options.only or [*FEATURES, EMPTY, WITHOUT_ROUTER]:
        one.add(asyncio.run(_measured(feature, seconds)))


if __name__ == "__main__":
    parser = arguments(__doc__, "half the time for each attack")
    parser.add_argument(
        "--only", nargs="+", choices=[*FEATURES, EMPTY, WITHOUT_ROUTER], metavar="FEATURE"
    )
    with run(parser, "Requests of the other tenant; p99 of all that it sent.") as made:
        main(made)
