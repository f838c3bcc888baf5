"""Tries how long SDKs wait for a silent model and how they come again, and prints a table.

    python -m tests.clients.sdk_patience [--installed] [--seconds 960]

For maintainers. Installs the newest SDKs of OpenAI and Anthropic, for Python and Node, beside the
clients of `tests.clients.newest` (--installed takes those that are there). Each asks once, with its
defaults, a model that is silent, or that refuses as the router does: 429 with `Retry-After`. All of
them at once; what still waits after so many seconds is ended.
"""

import argparse
import asyncio
import contextlib
import math
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, STDOUT
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.clients.install import NODE, Installed, newest
from tests.clients.reluctant_model import Attempt, reluctant
from tests.clients.starts import MODEL
from tests.waiting import until

KINDS = ("whole", "stream")

# Programs that start at once: the others wait until those have asked.
STARTING = 2


class Sdk(NamedTuple):
    """An SDK: its name in `tests.clients.install`, "" for Node itself, and what it asks with."""

    package: str
    word: str

    @property
    def is_of_python(self) -> bool:
        """Whether Python runs it."""
        return self.package.endswith("Python")


SDKS = (
    Sdk("openai of Python", "openai"),
    Sdk("anthropic of Python", "anthropic"),
    Sdk("openai of Node", "openai"),
    Sdk("anthropic of Node", "anthropic"),
    Sdk("", "fetch"),
)

# How long the model is silent, and how many requests it refuses.
TRIALS: Mapping[str, tuple[float, float]] = {
    "silent for 120 s": (120.0, 0),
    "silent for 290 s": (290.0, 0),
    "silent for 590 s": (590.0, 0),
    "silent": (math.inf, 0),
    "429 once": (0.0, 1),
    "429 always": (0.0, math.inf),
}


class Tried(NamedTuple):
    """What came of a trial.

    said: what the SDK printed, "" if it was ended. seconds: from its first request on.
    """

    sdk: Sdk
    kind: str
    trial: str
    said: str
    seconds: float
    attempts: Sequence[Attempt]


def _command(sdk: Sdk, kind: str, url: str, installed: Installed) -> list[str]:
    asked = [sdk.word, kind, url, MODEL]
    here = Path(__file__).parent
    if sdk.is_of_python:
        return [str(installed.program(sdk.package)), str(here / "sdk_programs.py"), *asked]
    main = [str(installed.program(sdk.package))] if sdk.package else []
    return [str(installed.node()), str(here / "sdk_programs.mjs"), *asked, *main]


class Trials:
    """Runs trials of some SDKs. most_seconds: for each, from its first request on."""

    def __init__(self, installed: Installed, most_seconds: float) -> None:
        self._installed = installed
        self._most_seconds = most_seconds
        self._starting = asyncio.Semaphore(STARTING)

    async def run(self, sdk: Sdk, kind: str, trial: str) -> Tried:
        """Runs one trial."""
        silent, refusals = TRIALS[trial]
        async with reluctant(silent, refusals) as model:
            command = _command(sdk, kind, model.url, self._installed)
            async with self._starting:
                process = await asyncio.create_subprocess_exec(
                    *command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT
                )
                await until(lambda: model.attempts, "it asks")
            said = b""
            try:
                with contextlib.suppress(TimeoutError):
                    said, _ = await asyncio.wait_for(process.communicate(), self._most_seconds)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            text = " ".join(said.decode(errors="replace").split())
            seconds = time.monotonic() - model.attempts[0].began_at
            return Tried(sdk, kind, trial, text, seconds, list(model.attempts))


def _row(one: Tried, installed: Installed) -> str:
    name = one.sdk.package or "fetch of Node"
    version = installed.version(one.sdk.package) if one.sdk.package else NODE.version
    first = one.attempts[0].began_at
    asked = ", ".join(
        f"{each.began_at - first:.1f}{f' (cut after {each.seconds:.1f})' if each.is_cut else ''}"
        for each in one.attempts
    )
    said = one.said[:90] or "still waits"
    tried = f"{name:<20}{version:<9}{one.kind:<7}{one.trial:<17}"
    return f"{tried}{one.seconds:>7.1f} s  {said}; asked at {asked}"


async def run(installed: Installed, most_seconds: float) -> None:
    """Runs all trials at once and prints a row for each."""
    kinds = [(sdk, kind) for sdk in SDKS for kind in KINDS if sdk.package or kind == "whole"]
    trials = Trials(installed, most_seconds)
    waiting = [trials.run(sdk, kind, trial) for sdk, kind in kinds for trial in TRIALS]
    for one in await asyncio.gather(*waiting):
        sys.stdout.write(f"{_row(one, installed)}\n")


def main(arguments: Sequence[str]) -> int:
    """Installs the SDKs, and tries them."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients.sdk_patience")
    parser.add_argument("--installed", action="store_true", help="install nothing")
    parser.add_argument("--seconds", type=float, default=960.0, help="at most for each trial")
    asked = parser.parse_args(arguments)
    installed = newest()
    failed = (
        {} if asked.installed else installed.install(one.package for one in SDKS if one.package)
    )
    for name, words in failed.items():
        sys.stderr.write(f"{name}: {words}\n")
    if failed:
        return 1
    asyncio.run(run(installed, asked.seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
