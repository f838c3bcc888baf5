import aiohttp
import pytest

from extproc.address import Address
from extproc.admin.application import listen, metrics_application
from extproc.observing.metrics import Metrics
from tests.ports import free_port


@pytest.mark.parametrize(
    ("hindrance", "answer"), [("", (200, "ready\n")), ("stopping", (503, "stopping\n"))]
)
async def test_scrapers_see_metrics_health_and_readiness(
    client: aiohttp.ClientSession, hindrance: str, answer: tuple[int, str]
) -> None:
    place = Address("127.0.0.1", free_port())
    runner = await listen(metrics_application(Metrics(), lambda: hindrance), place, "metrics")
    async with client.get(f"http://{place}/readyz") as response:
        assert (response.status, await response.text()) == answer
    async with client.get(f"http://{place}/healthz") as response:
        assert response.status == 200
    async with client.get(f"http://{place}/metrics") as response:
        assert "kvsteer_open_streams 0.0" in await response.text()
    await runner.cleanup()
