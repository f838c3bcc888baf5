"""POST /probe of a router behind a real Envoy, and the header that names warm models."""

from pathlib import Path
from typing import Any, cast

import pytest
from multidict import CIMultiDictProxy

from kvtools.simulator.settings import TINY_MODEL
from tests.ports import free_port
from tests.system.routing.test_features_off import Got, engine
from tests.system.system import CHAT, System, chat, long_text, running

TOKEN = "a-token-of-the-operators-choice"


@pytest.fixture
def probe(tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    return {"token_file": str(file), "listen": f"127.0.0.1:{free_port()}"}


async def probed(system: System, listen: str, body: dict[str, Any]) -> dict[str, Any]:
    sent = {"Authorization": f"Bearer {TOKEN}"}
    url = f"http://{listen}/probe"
    async with system.session.post(url, json=body, headers=sent) as response:
        answer = await response.json()
        assert response.status == 200, answer
    (one,) = answer["models"]
    return dict(one)


async def test_probe_foresees_what_the_worker_then_finds(probe: dict[str, Any]) -> None:
    async with running(workers=2, changes={"probe": probe}) as system:
        await system.serve(system.workers[0], long_text("a"))
        body = chat(long_text("a"))
        await system.learned(body, system.workers[0].endpoint)
        shown = await probed(system, probe["listen"], body)
        assert await system.metric('kvsteer_decisions_total{model="tiny",reason="overlap"}') == 0
        assert await system.metric('kvsteer_probes_total{outcome="answered"}') == 1
        _, worker, answer = await system.send(body)
    usage = answer["usage"]
    assert worker == system.workers[0].endpoint
    assert shown["prompt_tokens"] == usage["prompt_tokens"]
    assert (
        shown["pick"]["certain_tokens"]["device"] == usage["prompt_tokens_details"]["cached_tokens"]
    )


async def test_engine_gets_the_header_of_warm_models_and_no_clients_own() -> None:
    got: Got = []
    async with engine(got) as one, engine([]) as other:
        vllm = {"name": "vllm", "version": "0.32.0"}
        changes = {
            "models": [{"name": name, "tokenizer": str(TINY_MODEL)} for name in ("big", "small")],
            "workers": [
                {"endpoint": one, "model": "big", "engine": vllm},
                {"endpoint": other, "model": "small", "engine": vllm},
            ],
            "policy": {"warm_models": ["big", "small"]},
            "extproc": {"deadline_ms": 5_000},
            "envoy": {"message_timeout_ms": 20_000},
        }
        async with running(workers=0, changes=changes) as system:
            for model in ("small", "big"):
                body = chat(long_text("a"), model=model)
                sent = system.session.post(
                    f"{system.envoy}{CHAT}", json=body, headers={"x-kvsteer-warm": "big=1.00"}
                )
                async with sent as response:
                    assert response.status == 200
    ((sent_on, _),) = got
    (said,) = cast("CIMultiDictProxy[str]", sent_on).getall("x-kvsteer-warm")
    shares = dict(each.split("=") for each in said.split(", "))
    assert shares["big"] == "0.00"
    assert float(shares["small"]) > 0.5
