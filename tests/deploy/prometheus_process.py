"""A real Prometheus on loopback, for the duration of a test."""

import asyncio
import contextlib
import shutil
import tempfile
from asyncio.subprocess import DEVNULL
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from tests.ports import free_port

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="no prometheus on this machine; Debian has a package of that name, with promtool",
)


class Prometheus:
    """A running Prometheus, and its HTTP API."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url = url
        self._session = session

    async def query(self, expr: str) -> list[dict[str, Any]]:
        """The samples of an instant query."""
        answer = await self._get("query", {"query": expr})
        samples: list[dict[str, Any]] = answer["result"]
        return samples

    async def rules(self) -> dict[str, dict[str, Any]]:
        """The alert rules, by name."""
        groups = (await self._get("rules", {}))["groups"]
        return {rule["name"]: rule for group in groups for rule in group["rules"]}

    async def _get(self, what: str, params: dict[str, str]) -> dict[str, Any]:
        async with self._session.get(f"{self.url}/api/v1/{what}", params=params) as response:
            answer = await response.json()
            assert answer["status"] == "success", answer
            data: dict[str, Any] = answer["data"]
            return data

    async def is_up(self) -> bool:
        """Whether it answers."""
        try:
            async with self._session.get(f"{self.url}/-/ready") as response:
                return response.status == 200
        except aiohttp.ClientError:
            return False


@contextlib.asynccontextmanager
async def running_prometheus(scraped: str, rules: str) -> AsyncIterator[Prometheus]:
    """Scrapes host:port every half second, and evaluates rules as often, until the block ends."""
    with tempfile.TemporaryDirectory(prefix="prometheus-") as name:
        directory = Path(name)
        (directory / "kvsteer.rules.yml").write_text(rules)
        config = {
            "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
            "rule_files": ["kvsteer.rules.yml"],
            "scrape_configs": [{"job_name": "kvsteer", "static_configs": [{"targets": [scraped]}]}],
        }
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
        place = f"127.0.0.1:{free_port()}"
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={directory / 'prometheus.yml'}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address={place}",
            "--enable-feature=exemplar-storage",
            "--log.level",
            "error",
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=DEVNULL,
        )
        try:
            async with aiohttp.ClientSession() as session:
                yield Prometheus(f"http://{place}", session)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
