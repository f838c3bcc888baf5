import asyncio

import aiohttp

from extproc.config.reader import parse
from extproc.discovery.view import Member, listed
from tests.extproc.admin.serving import CONFIG, Served, serving

BY_HEADER = f"{CONFIG}\npolicy: {{header: X-Policy}}"


async def explained(session: aiohttp.ClientSession, served: Served, raw: str) -> dict[str, object]:
    async with session.post(f"{served.url}/explain", data=raw) as response:
        answer: dict[str, object] = await response.json()
        return answer


async def test_a_policy_that_the_request_asks_for_is_explained(
    client: aiohttp.ClientSession,
) -> None:
    raw = '{"headers": {"x-POLICY": "round_robin"}, "body": {"prompt": [1]}}'
    async with serving(BY_HEADER) as served:
        assert (await explained(client, served, raw))["policy"] == "round_robin"
    async with serving() as served:
        assert (await explained(client, served, raw))["policy"] == "cost"


async def test_a_body_is_explained_as_it_was_sent(
    served: Served, client: aiohttp.ClientSession
) -> None:
    doubled = '{"path": "/v1/completions", "body": {"model": "m", "prompt": [1], "prompt": [1, 2]}}'
    assert (await explained(client, served, doubled))["prompt_tokens"] == 2
    assert (await explained(client, served, '{"path": "/v1/completions"}'))[
        "reason"
    ] == "bad_request"


async def test_all_of_many_workers_are_told_of_while_they_come_and_go(
    client: aiohttp.ClientSession,
) -> None:
    names = [f"127.0.0.1:{port}" for port in range(1, 201)]
    config = "models: [{name: m}]\nworkers:\n" + "".join(f"- {{endpoint: '{n}'}}\n" for n in names)
    async with serving(config) as served:

        async def told() -> list[str]:
            async with client.get(f"{served.url}/workers") as response:
                return [one["name"] for one in await response.json()]

        assert await told() == names
        stay = listed(parse(config, "c").workers)[::2]
        some = {one.worker.endpoint: Member(one, "workers") for one in stay}
        answers, _ = await asyncio.gather(told(), served.workers.replace(some))
        assert set(some) <= set(answers) <= set(names)
        assert await told() == list(some)


async def test_what_is_wrong_with_an_envelope_is_told(
    served: Served, client: aiohttp.ClientSession
) -> None:
    told = await explained(client, served, '{"path": 5}')
    assert "$.path" in str(told["error"])
    told = await explained(client, served, "[" * 1_500)
    assert "error" in told
