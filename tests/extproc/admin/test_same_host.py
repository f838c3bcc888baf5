import re

import aiohttp
import pytest

from tests.extproc.admin.serving import Served


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "[::1"},
        {"Origin": "http://evil.example"},
        {"Origin": "http://[::1"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
    ],
)
async def test_requests_of_other_sites_are_refused(
    served: Served, client: aiohttp.ClientSession, headers: dict[str, str]
) -> None:
    async with client.get(f"{served.url}/workers", headers=headers) as response:
        assert response.status == 403
        assert re.search("served here|other origins|other sites", str(await response.json()))


@pytest.mark.parametrize("site", ["none", "same-origin"])
async def test_what_somebody_typed_and_the_page_itself_are_served(
    served: Served, client: aiohttp.ClientSession, site: str
) -> None:
    async with client.get(f"{served.url}/workers", headers={"Sec-Fetch-Site": site}) as response:
        assert response.status == 200


@pytest.mark.parametrize("host", ["localhost:1234", "[::1]:9", "127.0.0.1"])
async def test_loopback_names_are_served(
    served: Served, client: aiohttp.ClientSession, host: str
) -> None:
    headers = {"Host": host, "Origin": f"http://{host}"}
    async with client.get(f"{served.url}/workers", headers=headers) as response:
        assert response.status == 200
