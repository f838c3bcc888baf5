"""A request whose path is spelled otherwise is steered and stripped, behind a real Envoy."""

import json
from collections.abc import Callable

import pytest
import yaml
from aiohttp import web
from yarl import URL

from extproc.config.schema import Config
from extproc.envoy.envoy_config import render
from tests.http_server import serving
from tests.system.system import running

PATHS = (
    "/v1/chat/%63ompletions",
    "/v1%2fchat%2Fcompletions",
    "/%76%31/%63hat/%63ompletion%73?a=%63",
)
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "a"}]}


def as_it_comes(config: Config) -> str:
    """An Envoy that leaves paths as clients spell them."""
    tree = yaml.safe_load(render(config))
    (listener,) = tree["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    del manager["normalize_path"], manager["path_with_escaped_slashes_action"]
    return yaml.safe_dump(tree)


class Engine:
    """An engine that decodes paths, as uvicorn does, and tells what it gets."""

    def __init__(self) -> None:
        self.got: list[tuple[str, bytes]] = []

    async def serve(self, request: web.Request) -> web.Response:
        if "x-request-id" in request.headers:  # from Envoy; the router itself asks too
            self.got.append((request.path, await request.read()))
        return web.json_response({})


@pytest.mark.parametrize("envoy_config", [render, as_it_comes])
async def test_encoded_path_is_steered_and_its_body_loses_the_routers_fields(
    envoy_config: Callable[[Config], str],
) -> None:
    engine, changes = Engine(), {"disaggregation": {"mode": "header"}}
    async with (
        serving(engine.serve) as address,
        running(1, changes=changes, envoy_config=envoy_config, proxied=lambda _: address) as one,
    ):
        for count, path in enumerate(PATHS, 1):
            body = json.dumps(BODY | {"kv_transfer_params": {"remote_host": "10.9.9.9"}})
            url = URL(one.envoy + path, encoded=True)
            async with one.session.post(url, data=body) as answer:
                assert answer.status == 200
            seen, content = engine.got[-1]
            assert seen.partition("?")[0] == "/v1/chat/completions"
            assert json.loads(content) == BODY
            steered = sum(
                [
                    await one.metric(f'kvsteer_decisions_total{{model="tiny",reason="{reason}"}}')
                    for reason in ("nothing_cached", "speculative_overlap", "overlap")
                ]
            )
            assert steered == count
        assert await one.metric('kvsteer_decisions_total{model="",reason="not_inference"}') == 0
