"""The programs of other projects that tests/gateways run, built from source at pinned versions.

    python -m tests.gateways.install [NAME...]

Needs Go. Builds what is named, or everything, unless it is there already. The first build of a
gateway takes minutes, and some GB in Go's own caches. The programs go to ~/.cache/kvsteer/gateways,
or to the folder that KVSTEER_GATEWAYS names: one folder per program, and in it one per version.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

GO_VERSION = "1.26"


class Program(NamedTuple):
    """A program of a Go module.

    package: its path without the version; "" where it is not built here, but installed by hand.
    """

    package: str
    version: str


PROGRAMS = {
    "envoy-gateway": Program("github.com/envoyproxy/gateway/cmd/envoy-gateway", "v1.9.0"),
    "h2spec": Program("github.com/summerwind/h2spec/cmd/h2spec", "v2.2.1+incompatible"),
    # Of Istio's image `pilot`: 1.32-dev, by its commit.
    "pilot-discovery": Program("", "86c9f01fd735"),
}


class MissingError(LookupError):
    """A program is not there; the message says what to do."""


def folder() -> Path:
    """The folder of the programs."""
    named = os.environ.get("KVSTEER_GATEWAYS")
    return Path(named) if named else Path.home() / ".cache/kvsteer/gateways"


def binary(name: str) -> Path:
    """Path of a program that was built.

    Raises:
        MissingError: it was not, or not in this version.
    """
    place = _place(name)
    if place.exists():
        return place
    program = PROGRAMS[name]
    if not program.package:
        raise MissingError(f"{name} {program.version} is not built here: put it at {place}")
    how = f"python -m tests.gateways.install {name}"
    if shutil.which("go") is None:
        how += f", which needs Go {GO_VERSION}"
    raise MissingError(f"{name} {program.version} is not in {folder()}: {how}")


def install(name: str) -> None:
    """Builds a program.

    Raises:
        MissingError: there is no Go.
        subprocess.CalledProcessError: it could not be built; Go has said why.
    """
    go = shutil.which("go")
    if go is None:
        raise MissingError(f"{name} needs Go {GO_VERSION} on PATH")
    place, program = _place(name), PROGRAMS[name]
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as built:
        environment = os.environ | {"GOBIN": built, "CGO_ENABLED": "0"}
        command = [go, "install", "-ldflags=-s", f"{program.package}@{program.version}"]
        subprocess.run(command, env=environment, check=True)
        (Path(built) / program.package.rpartition("/")[2]).replace(place)


def _place(name: str) -> Path:
    return folder() / name / PROGRAMS[name].version / name


def main(names: list[str]) -> int:
    """Builds these programs, or all; prints where each one is. 1 if any could not be built."""
    if unknown := sorted(set(names) - set(PROGRAMS)):
        sys.stderr.write(f"unknown: {', '.join(unknown)}; there are {', '.join(PROGRAMS)}\n")
        return 2
    failed = False
    for name in names or [one for one, program in PROGRAMS.items() if program.package]:
        try:
            if PROGRAMS[name].package and not _place(name).exists():
                sys.stdout.write(f"{name} {PROGRAMS[name].version}: building\n")
                sys.stdout.flush()
                install(name)
            sys.stdout.write(f"{name}: {binary(name)}\n")
        except (MissingError, subprocess.CalledProcessError) as error:
            sys.stderr.write(f"{name}: {error}\n")
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
