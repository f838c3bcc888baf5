import re
from importlib.resources import files

import aiohttp
import pytest

from tests.extproc.admin.serving import Served

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
PAGE = files("extproc.admin") / "page"


async def test_browsers_get_the_page(served: Served, client: aiohttp.ClientSession) -> None:
    async with client.get(f"{served.url}/", headers=BROWSER) as response:
        assert (response.status, response.content_type) == (200, "text/html")
        assert "<title>KVSteer</title>" in await response.text()
        policy = response.headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in policy


@pytest.mark.parametrize("name", sorted(one.name for one in PAGE.iterdir()))
async def test_every_file_of_the_page_is_served(
    served: Served, client: aiohttp.ClientSession, name: str
) -> None:
    async with client.get(f"{served.url}/page/{name}") as response:
        assert response.status == 200
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert await response.read() == (PAGE / name).read_bytes()


@pytest.mark.parametrize("name", ["nothing.js", "..%2fapplication.py", "index.html%00"])
async def test_nothing_else_is_served(
    served: Served, client: aiohttp.ClientSession, name: str
) -> None:
    async with client.get(f"{served.url}/page/{name}") as response:
        assert response.status in {400, 404}


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for one in PAGE.iterdir():
        urls = re.findall(r"""(?:https?:)?//[\w.-]+\.\w+[^\s"']*""", one.read_text())
        assert set(urls) <= {"http://www.w3.org/2000/svg"}, one.name


def test_nothing_told_is_ever_read_as_html() -> None:
    readers = "innerHTML|outerHTML|insertAdjacentHTML|document.write|eval\\(|new Function"
    for one in PAGE.iterdir():
        if one.name.endswith(".js"):
            assert not re.findall(readers, one.read_text()), one.name
