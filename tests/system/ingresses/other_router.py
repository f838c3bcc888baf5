"""A second router beside a running system: the same configuration at other ports."""

import contextlib
import re
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import yaml

from tests import copies
from tests.ports import free_port
from tests.system.system import CHAT, System, chat


class OtherRouter:
    """One more router in a process of its own."""

    def __init__(self, system: System, listen: str, changes: dict[str, Any]) -> None:
        config = yaml.safe_load(system.config_file.read_text())
        for name in ("admin", "metrics"):
            config[name] = {"listen": f"127.0.0.1:{free_port()}"}
        config["extproc"] = {**config["extproc"], "listen": listen}
        config |= changes
        self.file = system.config_file.with_name(f"router-{listen.rpartition(':')[2]}.yaml")
        self.file.write_text(yaml.safe_dump(config))
        self.process: copies.Copy | None = None
        self._session = system.session
        self._admin = f"http://{config['admin']['listen']}"
        self._metrics = f"http://{config['metrics']['listen']}"

    async def start(self) -> None:
        """Starts it, without waiting."""
        with self.file.with_suffix(".log").open("ab") as log:
            self.process = await copies.started(["serve", "--config", str(self.file)], log)

    async def stop(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Ends it, and returns its status."""
        assert self.process
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return await self.process.wait()

    async def routers(self) -> list[dict[str, Any]]:
        """The routers that it shares with, from GET /routers."""
        try:
            async with self._session.get(f"{self._admin}/routers") as response:
                told = await response.json()
        except aiohttp.ClientError:
            return []
        return list(told["routers"])

    async def hears(self) -> bool:
        return bool(await self.routers())

    async def readiness(self) -> tuple[int, str]:
        """The answer of GET /readyz; 0 if nothing answers."""
        try:
            async with self._session.get(f"{self._metrics}/readyz") as response:
                return response.status, await response.text()
        except aiohttp.ClientError:
            return 0, ""

    async def is_ready(self) -> bool:
        return (await self.readiness())[0] == 200

    async def feeds(self) -> set[str]:
        """The states of all workers' feeds."""
        async with self._session.get(f"{self._admin}/workers") as response:
            return {feed["state"] for worker in await response.json() for feed in worker["feeds"]}

    async def decisions(self) -> int:
        """The number of requests that it has decided."""
        return await decisions(self._session, self._metrics)

    async def explain(self, text: str) -> dict[str, Any]:
        return await self.explain_body(chat(text), CHAT)

    async def explain_body(self, body: dict[str, Any], path: str) -> dict[str, Any]:
        """POST /explain."""
        envelope = {"path": path, "headers": {}, "body": body}
        async with self._session.post(f"{self._admin}/explain", json=envelope) as response:
            decision: dict[str, Any] = await response.json()
        return decision

    async def running(self, text: str) -> float:
        """The cost of running requests, summed over all candidates."""
        decision = await self.explain(text)
        return float(sum(one["cost_terms"]["running"] for one in decision["candidates"]))


async def decisions(session: aiohttp.ClientSession, metrics: str) -> int:
    """How many requests a router has decided; metrics: the URL of its server for scrapers."""
    async with session.get(f"{metrics}/metrics") as response:
        text = await response.text()
    return int(
        sum(map(float, re.findall(r"^kvsteer_decisions_total\{.*\} (\S+)$", text, re.MULTILINE)))
    )


@contextlib.asynccontextmanager
async def other_router(
    system: System, listen: str = "", **changes: Any
) -> AsyncIterator[OtherRouter]:
    """Starts another router; changes: sections of the configuration to replace."""
    router = OtherRouter(system, listen or f"127.0.0.1:{free_port()}", changes)
    await router.start()
    try:
        yield router
    finally:
        await router.stop()
