"""The routers that are judged: contestants that the judge starts, and those that run already."""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from extproc_contestants import Contestant
from extproc_parts import Fleet
from judge_claims import Explained, Logged, Silent
from judge_engines import Place
from judge_play import Foretelling, Start
from measure import CannotRunError
from peers_contestants import VLLM_ROUTER, PeersArena
from peers_settings import as_llm_d_has_it


class JudgedArena(PeersArena):
    """Contestants in front of engines that the judge runs."""

    def __init__(
        self, stack: ExitStack, directory: Path, name: str, fleet: Fleet, size: int
    ) -> None:
        self._given = fleet
        super().__init__(stack, directory, [name], block_size=size, vllm_router_log="debug")

    def _started_fleet(self) -> Fleet:
        published, replayed = self._given.events[0]
        ports = (self._given.endpoints[0], published, replayed, published)
        self._ports = [one.rpartition(":")[2] for one in ports]
        return self._given

    def answering(self, decides: str, *, like_llm_d: bool) -> Contestant:
        """Starts an Envoy that asks the router at this address."""
        configuration = self._fleet.configuration()
        configuration["extproc"]["listen"] = decides
        change = as_llm_d_has_it if like_llm_d else str
        return self._with_envoy("given", None, configuration, change)


def places_at(addresses: Sequence[str], ports: tuple[int, int, int]) -> list[Place]:
    """Returns an engine's places for each IP address."""
    api, events, replay = ports
    return [
        Place(f"{ip}:{api}", f"tcp://{ip}:{events}", f"tcp://{ip}:{replay}") for ip in addresses
    ]


def contestant(name: str, places: Sequence[Place], size: int) -> Start:
    """Returns what starts one of CONTESTANTS."""
    fleet = _fleet(places)

    def start(stack: ExitStack, directory: Path) -> tuple[str, Foretelling]:
        arena = JudgedArena(stack, directory, name, fleet, size)
        if name in arena.missing:
            raise CannotRunError(arena.missing[name])
        one = arena.contestants[name]
        if name == VLLM_ROUTER:
            return one.url, lambda _: Logged(directory / "vllm-router.log")
        return one.url, _foretelling(one.admin)

    return start


def running_router(options: argparse.Namespace, places: Sequence[Place], size: int) -> Start:
    """Returns what starts nothing, or an Envoy, for a router that runs already."""

    def start(stack: ExitStack, directory: Path) -> tuple[str, Foretelling]:
        if options.router:
            return options.router.rstrip("/"), _foretelling(options.admin)
        arena = JudgedArena(stack, directory, "", _fleet(places), size)
        like_llm_d = options.settings == "llm-d"
        url = arena.answering(options.ext_proc, like_llm_d=like_llm_d).url
        return url, _foretelling(options.admin)

    return start


def _foretelling(admin: str | None) -> Foretelling:
    return lambda session: Explained(session, admin) if admin else Silent()


def _fleet(places: Sequence[Place]) -> Fleet:
    endpoints = [one.api for one in places]
    return Fleet(endpoints, endpoints, [(one.events, one.replay) for one in places])
