"""Tries how long coding agents wait for a silent model, and prints a table.

    python -m tests.clients.client_patience [--seconds 700]

For maintainers. Runs a task of each agent that `make clients` installs, all of them at once, with a
model that never answers; what still waits after so many seconds is ended.
"""

import argparse
import asyncio
import contextlib
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.clients.install import MissingError, pinned
from tests.clients.reluctant_model import reluctant
from tests.clients.sessions import Session, converse
from tests.clients.starts import STARTS


async def row(client: str, folder: Path, most_seconds: float) -> str:
    """What a client does for so many seconds at most."""
    session: Session | None = None
    async with reluctant(silent_seconds=math.inf) as model:
        with contextlib.suppress(TimeoutError):
            talk = converse(client, 0, model.url, folder)
            session = await asyncio.wait_for(talk, most_seconds)
        turns = [one for one in model.attempts if one.is_agent]
        cuts = [f"{one.seconds:.0f}" for one in turns if one.is_cut]
        tries = f"{len(turns)} turns, cut after {', '.join(cuts)} s"
        end = "still waits" if session is None else f"ends with {session.code}"
        said = "" if session is None else " ".join(session.printed.split())[-160:]
        return f"{client:<14}{pinned().version(client):<9}{end}; {tries}; {said}"


async def run(most_seconds: float) -> None:
    """Tries all clients at once and prints a row for each."""
    with tempfile.TemporaryDirectory(prefix="kvsteer-patience-") as folder:
        rows = [row(client, Path(folder), most_seconds) for client in STARTS]
        for one in await asyncio.gather(*rows):
            sys.stdout.write(f"{one}\n")


def main(arguments: Sequence[str]) -> int:
    """Tries the clients."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.client_patience")
    parser.add_argument("--seconds", type=float, default=700.0, help="at most for each client")
    asked = parser.parse_args(arguments)
    try:
        asyncio.run(run(asked.seconds))
    except MissingError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
