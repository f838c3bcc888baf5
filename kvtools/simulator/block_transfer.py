"""Transfers of KV blocks: a prefill worker keeps blocks until its decode worker has them.

Both get the request at about the same time, in any order, and find each other by a number in it:
SGLang's `bootstrap_room`, or the id in vLLM's `kv_transfer_params`. SGLang's prefill worker waits
for its partner before it computes, vLLM's keeps what it computed; both give up after their time
limit (300 s by default: SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT and _WAITING_TIMEOUT), and so does
a decode worker that gets nothing. A request may name a worker that holds more of its prompt (vLLM's
`remote_kv_source`): a plain worker fetches the difference from it, and computes the rest. Transfers
use HTTP here (engines have protocols of their own), and take time in proportion to their tokens.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import aiohttp
from aiohttp import web

from kvtools.simulator.hashing import CacheNamespace
from kvtools.simulator.rank import Rank
from kvtools.simulator.requests import Generation
from kvtools.simulator.responses import ApiError, bad_request
from kvtools.simulator.settings import Settings

_PATH = "/transfer/"
_HELD = "/held"
_MAX_ROOMS = 100_000


class TransferSide(NamedTuple):
    """The part of a request to compute. place: host:port of the partner, "" for prefill."""

    rooms: tuple[str, ...]
    place: str = ""
    is_patient: bool = False
    """Whether a prefill worker waits for its partner before it computes."""


@dataclass(slots=True)
class _Room:
    joined: asyncio.Event = field(default_factory=asyncio.Event)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    pulled: asyncio.Event = field(default_factory=asyncio.Event)
    is_begun: bool = False
    is_lost: bool = False


class BlockTransfer:
    """One worker's half of the transfers.

    ranks: those whose blocks other workers may fetch. finished: parts completed. timeouts: parts
    whose partner did not come, or failed. pulled_tokens: tokens fetched from other workers.
    """

    def __init__(self, settings: Settings, ranks: Sequence[Rank] = ()) -> None:
        self._settings = settings
        self._ranks = ranks
        self.pulled_tokens = 0
        self._rooms: dict[str, _Room] = {}
        self._client: aiohttp.ClientSession | None = None
        self.finished = 0
        self.timeouts = 0

    @property
    def waiting(self) -> int:
        """The number of unfinished parts."""
        return len(self._rooms)

    def application(self) -> web.Application:
        """Returns the application that decode workers call."""
        application = web.Application()
        application.add_routes(
            [web.get(f"{_PATH}{{room}}", self._hand_over), web.post(_HELD, self._report_cached)]
        )
        return application

    async def close(self) -> None:
        """Ends the connections to other workers."""
        if self._client is not None:
            await self._client.close()

    def side_of(self, body: Generation) -> TransferSide | None:
        """Returns the part of a request for this worker; None for the whole request.

        Raises:
            ApiError: the engine needs a field that the body lacks.
        """
        role = self._settings.role
        if self._settings.event_dialect.engine == "sglang":
            if role == "both":
                return None
            if body.bootstrap_room is None:
                what = "Disaggregated request received without bootstrap room id."
                raise bad_request(what, "bootstrap_room")
            place = f"{_first(body.bootstrap_host)}:{_first(body.bootstrap_port)}"
            listed = body.bootstrap_room
            rooms = tuple(map(str, listed if isinstance(listed, list) else [listed]))
            return TransferSide(rooms, place if role == "decode" else "", is_patient=True)
        said = body.kv_transfer_params or {}
        if (source := said.get("remote_prefiller")) is not None:
            place = f"{source['remote_host']}:{source['remote_port']}"
            return TransferSide((source["kv_request_id"],), place)
        if (partner := said.get("remote_decoder")) is not None:
            return TransferSide((partner["kv_request_id"],))
        if said.get("do_remote_prefill"):
            return TransferSide(
                (said["transfer_id"],), said["remote_bootstrap_addr"].partition("//")[2]
            )
        return TransferSide((said["transfer_id"],)) if said.get("do_remote_decode") else None

    def source_of(self, body: Generation) -> str:
        """Returns host:port of the worker that holds more of the prompt; "" if none is named."""
        source = (body.kv_transfer_params or {}).get("remote_kv_source")
        return "" if source is None else f"{source['remote_host']}:{source['remote_port']}"

    async def pull(
        self, place: str, prompt: Sequence[int], namespace: CacheNamespace, held: int
    ) -> int:
        """Fetches the blocks that another worker holds beyond those held here.

        Returns how many leading tokens are held afterwards; `held` if the other worker does not
        answer, or the request uses an adapter.
        """
        if namespace.adapter is not None:
            return held
        asked = {"tokens": list(prompt), "salt": namespace.salt}
        limit = aiohttp.ClientTimeout(total=self._settings.transfer_timeout_seconds)
        try:
            async with self._session().post(
                f"http://{place}{_HELD}", json=asked, timeout=limit
            ) as answer:
                answer.raise_for_status()
                cached = int(await answer.text())
        except (aiohttp.ClientError, TimeoutError, ValueError):
            return held
        more = max(0, cached - held)
        await asyncio.sleep(more / self._settings.transfer_tokens_per_second)
        self.pulled_tokens += more
        return held + more

    async def _report_cached(self, request: web.Request) -> web.Response:
        asked = await request.json()
        namespace = CacheNamespace(salt=asked["salt"])
        held = [rank.engine.cache.held_tokens(asked["tokens"], namespace) for rank in self._ranks]
        return web.Response(text=str(max(held, default=0)))

    @asynccontextmanager
    async def taking_part(self, side: TransferSide, tokens: int) -> AsyncIterator[None]:
        """Waits for the transfers before or after this worker computes its part.

        tokens: prompt tokens that are not held here.

        Raises:
            ApiError: the partner does not come, or fails.
        """
        if side.place:
            for name in side.rooms:
                await self._fetch(side.place, name)
            await asyncio.sleep(tokens / self._settings.transfer_tokens_per_second)
            yield
            self.finished += 1
            return
        rooms = [self._begin_room(name) for name in side.rooms]
        try:
            for room in rooms:
                if side.is_patient:
                    await self._wait_for(room.joined, "KVPoll.Bootstrapping")
            yield
            for room in rooms:
                room.ready.set()
                await self._wait_for(room.pulled, "KVPoll.WaitingForInput")
            self.finished += 1
        finally:
            for name, room in zip(side.rooms, rooms, strict=True):
                room.is_lost = not room.pulled.is_set()
                room.ready.set()
                self._rooms.pop(name, None)

    def _begin_room(self, name: str) -> _Room:
        room = self._room(name)
        if room.is_begun:
            raise ApiError(500, "InternalServerError", "this room is taken")
        room.is_begun = True
        return room

    def _room(self, name: str) -> _Room:
        if len(self._rooms) >= _MAX_ROOMS:
            raise ApiError(503, "ServiceUnavailableError", "too many rooms")
        return self._rooms.setdefault(name, _Room())

    async def _wait_for(self, event: asyncio.Event, where: str) -> None:
        try:
            async with asyncio.timeout(self._settings.transfer_timeout_seconds):
                await event.wait()
        except TimeoutError:
            self.timeouts += 1
            raise ApiError(500, "InternalServerError", f"Request timed out in {where}") from None

    async def _hand_over(self, request: web.Request) -> web.Response:
        """Answers with a room's blocks once they are computed."""
        name = request.match_info["room"]
        room = self._room(name)
        room.joined.set()
        try:
            await room.ready.wait()
        finally:
            if not room.is_begun:
                self._rooms.pop(name, None)
        if room.is_lost:
            raise web.HTTPGone
        room.pulled.set()
        return web.Response()

    def _session(self) -> aiohttp.ClientSession:
        if self._client is None:
            self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._client

    async def _fetch(self, place: str, room: str) -> None:
        limit = aiohttp.ClientTimeout(total=self._settings.transfer_timeout_seconds)
        try:
            async with self._session().get(f"http://{place}{_PATH}{room}", timeout=limit) as answer:
                answer.raise_for_status()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self.timeouts += 1
            what = f"KVTransferError: {type(error).__name__}"
            raise ApiError(500, "InternalServerError", what) from None


def _first(value: object) -> object:
    return value[0] if isinstance(value, list) and value else value
