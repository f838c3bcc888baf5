import aiohttp

from tests.extproc.admin.serving import Served


async def test_prefixes_of_the_last_prompts_are_told(
    served: Served, client: aiohttp.ClientSession
) -> None:
    for tokens in (20, 40):
        await served.route(tokens)
    async with client.get(f"{served.url}/prefixes") as response:
        told = await response.json()
    assert told["prompts"] == 2
    assert [(one["tokens"], one["requests"]) for one in told["prefixes"]] == [(20, 2), (40, 1)]
    assert told["prefixes"][0]["held_by"] == 0


async def test_history_is_told_of_all_workers_or_of_those_named(
    served: Served, client: aiohttp.ClientSession
) -> None:
    served.observed.sample(5.0, {"a": (1, 2), "b": (0, 3)})
    async with client.get(f"{served.url}/history") as response:
        told = await response.json()
    assert told["step_seconds"] == 5.0
    assert (told["at"], set(told["workers"])) == ([5.0], {"a", "b"})
    assert told["fleet"]["blocks"] == [5]
    async with client.get(f"{served.url}/history?worker=b&worker=gone") as response:
        told = await response.json()
    assert {name: one["blocks"] for name, one in told["workers"].items()} == {
        "b": [3],
        "gone": [None],
    }


async def test_the_history_of_no_worker_of_ours_is_not_found(
    served: Served, client: aiohttp.ClientSession
) -> None:
    async with client.get(f"{served.url}/history?worker=zzz") as response:
        assert (response.status, await response.json()) == (
            404,
            {"error": "there is no such worker"},
        )
    async with client.get(f"{served.url}/history?worker=127.0.0.1:1") as response:
        assert response.status == 200  # one that is there, and nothing noted of it yet
