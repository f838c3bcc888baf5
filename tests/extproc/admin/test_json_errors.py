import aiohttp
import pytest

from tests.extproc.admin.serving import Served


@pytest.mark.parametrize(
    ("method", "path", "status", "reason"),
    [
        ("GET", "nowhere", 404, "there is no such path"),
        ("GET", "page/nothing.js", 404, "there is no such path"),
        ("DELETE", "draining", 405, "DELETE is not for this path: GET, HEAD, POST"),
        ("GET", "decisions/9", 404, "this decision is not kept any more"),
    ],
)
async def test_every_error_is_json(
    served: Served, client: aiohttp.ClientSession, method: str, path: str, status: int, reason: str
) -> None:
    async with client.request(method, f"{served.url}/{path}") as response:
        assert (response.status, await response.json()) == (status, {"error": reason})


async def test_a_body_above_the_limit_is_refused_as_json(
    served: Served, client: aiohttp.ClientSession
) -> None:
    async with client.post(f"{served.url}/explain", data=b" " * 2001) as response:
        assert response.status == 413
        assert "2000" in (await response.json())["error"]
