import aiohttp
import pytest

from extproc.address import Address
from extproc.admin.listening import listen
from extproc.admin.metrics_application import metrics_application
from extproc.metrics import Metrics
from tests.ports import free_port


@pytest.mark.parametrize(("ready", "status"), [(True, 200), (False, 503)])
async def test_scrapers_see_metrics_health_and_readiness(
    client: aiohttp.ClientSession, *, ready: bool, status: int
) -> None:
    place = Address("127.0.0.1", free_port())
    runner = await listen(metrics_application(Metrics(), lambda: ready), place, "metrics")
    async with client.get(f"http://{place}/readyz") as response:
        assert response.status == status
    async with client.get(f"http://{place}/healthz") as response:
        assert response.status == 200
    async with client.get(f"http://{place}/metrics") as response:
        assert "kvsteer_open_streams 0.0" in await response.text()
    await runner.cleanup()
