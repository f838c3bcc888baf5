"""Real coding agents behind KVSteer, SMG and vLLM Router: how many turns reach their worker.

The pinned agents from npm (`python -m tests.clients.install`), all at once, with a scripted model
behind three workers whose answers take two seconds. Where KVSTEER_VLLM_PYTHON names a Python with
vLLM, its renderer computes the prompts, so that the workers publish events: vLLM Router needs
these. Without it nothing is known of the model but its texts. SMG compares only these.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from extproc_contestants import OURS_LEAN, SMG
from extproc_parts import found_smg
from measure import CannotRunError, Figure, Goal, Result, Row, or_reason
from peers_contestants import VLLM_ROUTER, program

from tests.clients.front import Front, fronted
from tests.clients.install import MissingError, pinned
from tests.clients.rendering import rendering
from tests.clients.starts import CONTEXT_TOKENS, MODEL, STARTS
from tests.clients.tools_model import write_tools_model
from tests.clients.turns import Stays, all_converse, conversations, stays_of
from tests.engines import vllm_engine
from tests.ports import free_port
from tests.waiting import until

ANSWER_SECONDS = 2.0
BLOCK_TOKENS = 16
# So many blocks that nothing is evicted.
WORKER = {
    "blocks": 60_000,
    "block_size_tokens": BLOCK_TOKENS,
    "max_model_len_tokens": CONTEXT_TOKENS,
}
STAYS_GOAL = Goal(1.0, "all of ours", of_ratio=False, at_least=True)


def stays(count: int) -> list[Row]:
    """Returns rows for each client. count: how many conversations of each run at once."""
    found = {who: _told(count, who) for who in (OURS_LEAN, SMG, VLLM_ROUTER)}
    return [
        Row(
            f"{name}: turns on their worker, ours / {theirs}",
            _share(found[OURS_LEAN], name),
            _share(found[theirs], name),
            STAYS_GOAL,
        )
        for theirs in (SMG, VLLM_ROUTER)
        for name in STARTS
    ]


def _told(count: int, who: str) -> dict[str, Stays] | str:
    found = or_reason(partial(_measured, count, who))
    if not isinstance(found, str):
        for client, one in found.items():
            turns = f"{one.stayed} of {one.later} later turns; by worker {one.spread}"
            print(f"  {who}: {client}: {turns}", flush=True)
    return found


def _share(found: dict[str, Stays] | str, client: str) -> Result:
    if isinstance(found, str):
        return found
    one = found[client]
    return Figure([one.stayed / one.later]) if one.stayed else "it answered no later turn there"


def _measured(count: int, who: str) -> dict[str, Stays]:
    try:
        for name in STARTS:
            pinned().program(name)
    except MissingError as error:
        raise CannotRunError(f"did not run: {error}") from None
    if who == VLLM_ROUTER and vllm_engine.missing():
        raise CannotRunError("did not run: KVSTEER_VLLM_PYTHON names no Python with vLLM")
    path = found_smg() if who == SMG else program("vllm-router") if who == VLLM_ROUTER else ""
    return asyncio.run(_run(count, who, path))


async def _run(count: int, who: str, path: str) -> dict[str, Stays]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvsteer-bench-")))
        model = write_tools_model(folder / "model")
        changes: dict[str, Any] = {"models": [{"name": MODEL}]}
        known: dict[str, Any] = {}
        if not vllm_engine.missing():
            renderer = await stack.enter_async_context(rendering(vllm_engine.PYTHON, model))
            changes = {"models": [{"name": MODEL, "tokenizer": str(model)}]}
            known = {"renderer": renderer, "names_engine": True, **WORKER}
        ran = fronted(changes, ANSWER_SECONDS, **known)
        system, fronts = await stack.enter_async_context(ran)
        url = system.envoy
        if who == SMG:
            url = await _started_smg(stack, path, [front.endpoint for front in fronts])
        elif who == VLLM_ROUTER:
            url = await _started_vllm_router(stack, path, fronts, model)
        await all_converse(url, folder, count)
        found = conversations(fronts)
        return {client: stays_of(client, found) for client in STARTS}


async def _started_smg(stack: AsyncExitStack, smg: str, workers: list[str]) -> str:
    """Starts SMG before these workers; returns its URL."""
    port, metrics = free_port(), free_port()
    command = [smg, "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls"]
    command += [*(f"http://{one}" for one in workers), "--policy", "cache_aware"]
    command += ["--worker-startup-check-interval", "1", "--log-level", "error"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    url = f"http://127.0.0.1:{port}"
    return await _started(stack, command, url, "/readiness")


async def _started_vllm_router(
    stack: AsyncExitStack, path: str, fronts: Sequence[Front], model: Path
) -> str:
    """Starts vLLM Router before these workers, with their events; returns its URL."""
    port, metrics = free_port(), free_port()
    command = [path, "--host", "127.0.0.1", "--port", str(port), "--policy", "kv_aware"]
    command += ["--worker-urls", *(f"http://{front.endpoint}" for front in fronts)]
    for front in fronts:
        assert front.worker is not None
        for option, places in (
            ("--kv-event-source", front.worker.events_endpoints),
            ("--kv-event-replay-source", front.worker.replay_endpoints),
        ):
            command += [option, f"http://{front.endpoint}={places[0]}"]
    command += ["--kv-event-model", str(model), "--kv-event-block-size", str(BLOCK_TOKENS)]
    command += ["--worker-startup-check-interval", "1", "--log-level", "error"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    return await _started(stack, command, f"http://127.0.0.1:{port}", "/health")


async def _started(stack: AsyncExitStack, command: Sequence[str], url: str, ready: str) -> str:
    process = await asyncio.create_subprocess_exec(*command)

    async def end() -> None:
        process.kill()
        await process.wait()

    stack.push_async_callback(end)

    async def is_ready() -> bool:
        assert process.returncode is None, f"{command[0]} ended"
        try:
            async with aiohttp.ClientSession() as session, session.get(url + ready) as told:
                return told.status == 200
        except aiohttp.ClientError:
            return False

    await until(is_ready, f"{command[0]} is ready")
    return url
