"""Event loops with a clock or names of their own, for what no test can wait for or owns."""

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any


class SkippingLoop(asyncio.SelectorEventLoop):
    """Its clock is the real one plus what the test skips."""

    skipped_seconds = 0.0

    def time(self) -> float:
        return super().time() + self.skipped_seconds


class NamingLoop(asyncio.SelectorEventLoop):
    """Every host name has the addresses that the test says."""

    addresses: tuple[str, ...] = ()

    async def getaddrinfo(self, _: Any, port: Any, **__: Any) -> list[Any]:  # type: ignore[override]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in self.addresses]


def run_in(loop: asyncio.AbstractEventLoop, scenario: Coroutine[None, None, None]) -> None:
    """Runs a test's scenario in such a loop."""
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(scenario)
