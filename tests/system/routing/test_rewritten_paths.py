"""Requests whose paths Envoy rewrites after it has asked the router."""

from typing import Any

import yaml

from extproc.config.schema import Config
from extproc.envoy.envoy_config import render
from tests.system.system import CHAT, System, chat, long_text, running
from tests.waiting import until

PREFIX = "/llm/tiny"
AZURE = "/openai/deployments/tiny"


def with_rewrites(config: Config) -> str:
    """An Envoy with routes as KServe and Azure's API have them, before the usual ones."""
    tree: dict[str, Any] = yaml.safe_load(render(config))
    (listener,) = tree["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    (host,) = manager["route_config"]["virtual_hosts"]
    usual = host["routes"][0]
    for prefix, to in ((f"{PREFIX}/", "/"), (f"{AZURE}/", "/v1/"), ("/gone/", "/")):
        action = usual["route"] | {"prefix_rewrite": to}
        host["routes"].insert(0, usual | {"match": {"prefix": prefix}, "route": action})
    return yaml.safe_dump(tree)


async def cached_tokens(system: System, path: str, text: str) -> int:
    async with system.session.post(system.envoy + path, json=chat(text)) as answer:
        assert answer.status == 200
        usage = (await answer.json())["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])


async def is_shown(system: System, code: str) -> bool:
    async with system.session.get(f"{system.admin}/faults") as answer:
        return any(one["code"] == code for one in await answer.json())


async def test_turns_under_a_rewritten_path_find_their_cache() -> None:
    async with running(2, envoy_config=with_rewrites) as system:
        for path in (PREFIX + CHAT, AZURE + "/chat/completions"):
            text = long_text(path)
            assert await cached_tokens(system, path, text) == 0
            for _ in range(6):
                assert await cached_tokens(system, path, text) > 0, path
        assert await system.metric('kvsteer_decisions_total{model="",reason="not_inference"}') == 0
        assert await system.metric("kvsteer_unrecognized_requests_total") == 0


async def test_prefix_is_configured_where_bodies_are_edited() -> None:
    changes = {
        "policy": {
            "classes": {"header": "x-class", "default": "a", "of": [{"name": "a"}, {"name": "b"}]}
        },
        "extproc": {"path_prefixes": [f"{PREFIX}/"]},
    }
    async with running(2, changes=changes, envoy_config=with_rewrites) as system:
        text = long_text("a")
        await cached_tokens(system, PREFIX + CHAT, text)
        assert await cached_tokens(system, PREFIX + CHAT, text) > 0
        for _ in range(13):
            await cached_tokens(system, "/gone" + CHAT, text)
        await until(lambda: is_shown(system, "paths-unrecognized"), "the fault is shown")
        assert await system.metric("kvsteer_unrecognized_requests_total") == 13
