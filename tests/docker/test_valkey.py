"""Valkey's own container, as the compose file runs it, between two routers' parts in sharing."""

from collections.abc import Iterator

import pytest

from tests.docker.test_compose import docker, fetch, why_no_engine
from tests.docker.test_compose_files import image_of, services
from tests.extproc.sharing.test_sharing import two
from tests.faults import said
from tests.waiting import until

pytestmark = pytest.mark.docker

CONFINED = ("--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges:true")


@pytest.fixture(scope="module")
def image() -> str:
    if reason := why_no_engine():
        pytest.skip(f"needs a Docker engine: {reason}")
    wanted = image_of(services()["valkey"])
    fetch(wanted)
    return wanted


@pytest.fixture
def container(image: str) -> Iterator[str]:
    service = services()["valkey"]
    rights = (*CONFINED, f"--user={service['user']}", *(f"--tmpfs={at}" for at in service["tmpfs"]))
    name = docker(
        "run", "--detach", "--publish=127.0.0.1::6379", *rights, image, *service["command"]
    )
    try:
        yield name
    finally:
        docker("rm", "--force", name)


async def test_routers_share_through_a_valkey_container_and_pause_without_it(
    container: str,
) -> None:
    url = f"valkey://{docker('port', container, '6379/tcp').splitlines()[0]}"
    async with two(url=url) as (one, other):
        one.send()
        await until(lambda: other.others() == 1, "shared")
        docker("pause", container)
        await until(lambda: one.is_alone() and other.is_alone(), "alone while it is paused")
        docker("unpause", container)
        await until(lambda: other.others() == 1 and not other.is_alone(), "shared again")
        docker("stop", "--timeout=1", container)
        await until(lambda: one.is_alone() and other.others() == 0, "alone without it")


async def test_valkey_refuses_a_router_without_permission_to_publish(container: str) -> None:
    url = f"valkey://{docker('port', container, '6379/tcp').splitlines()[0]}"
    async with two(url=url) as (one, _):
        docker("exec", container, "valkey-cli", "ACL", "SETUSER", "default", "-publish")
        await until(lambda: "permission" in said(one.sharing).lower(), "refused")
