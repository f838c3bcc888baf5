"""What a simulated worker has over a real one: faults on request, and a look into its cache."""

import msgspec
from aiohttp import web

from simulator.bodies import decoded, json_response
from simulator.requests import CachedPrefix, Misbehave
from simulator.responses import bad_request
from simulator.worker import Worker


class Inspection:
    """The endpoints that Settings.misbehave opens."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def routes(self) -> list[web.RouteDef]:
        """To be added to the worker's API."""
        return [
            web.post("/misbehave", self._misbehave),
            web.get("/cache", self._cache),
            web.post("/cache/prefix", self._prefix),
        ]

    async def _misbehave(self, request: web.Request) -> web.Response:
        body = await decoded(request, Misbehave)
        self._check_rank(body.rank)
        self._break(body)
        return json_response({"success": True})

    def _break(self, body: Misbehave) -> None:
        """A restart comes first and garbage last; what is not mentioned stays as it was."""
        faults, rank = self._worker.faults, body.rank
        if body.restart:
            faults.restart(rank=rank)
        if body.hide_replay is not msgspec.UNSET:
            faults.hide_replay(body.hide_replay, rank=rank)
        if body.hide_events is not None:
            faults.hide_events(hidden=body.hide_events, rank=rank)
        for batches, method in (
            (body.drop, faults.drop),
            (body.lose, faults.lose),
            (body.duplicate, faults.duplicate),
        ):
            if batches is not None:
                method(batches, rank=rank)
        if body.reorder:
            faults.reorder(rank=rank)
        if body.corrupt is not None:
            faults.corrupt(body.corrupt, rank=rank)
        if body.garbage is not None:
            faults.garbage(body.garbage, rank=rank)

    async def _cache(self, _: web.Request) -> web.Response:
        """Blocks held on the device and off it, and the number of the next batch, by rank."""
        return json_response([self._of_rank(rank.number) for rank in self._worker.ranks])

    def _of_rank(self, number: int) -> dict[str, int]:
        blocks, host_blocks = self._worker.ranks[number].engine.cache.blocks_held
        return {
            "rank": number,
            "blocks": blocks,
            "host_blocks": host_blocks,
            "next_sequence": self._worker.next_sequence(number),
        }

    async def _prefix(self, request: web.Request) -> web.Response:
        """Leading tokens of a prompt that a rank holds, short of the last one."""
        body = await decoded(request, CachedPrefix)
        self._check_rank(body.rank)
        if body.lora is not None and body.lora not in self._worker.settings.adapters:
            raise bad_request("no such adapter", "lora")
        held = self._worker.held_prefix_tokens(body.tokens, body.salt, body.lora, body.rank)
        return json_response({"held_tokens": held})

    def _check_rank(self, rank: int | None) -> None:
        if rank is not None and rank >= len(self._worker.ranks):
            raise bad_request("no such rank", "rank")
