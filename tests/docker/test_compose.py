import http.client
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from testcontainers.compose import DockerCompose

from tests.docker.test_compose_files import image_of, services
from tests.waiting import blocked_until

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
ENVOY_PORT, ADMIN_PORT = 10000, 9090
# Envoy looks for a restarted router every few seconds.
WAIT_SECONDS = 60.0
REPEATS = 6
START_ROUTER = ("up", "--wait", "--no-recreate", "kvsteer")

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


@dataclass(frozen=True)
class Answer:
    status: int
    worker: str
    cached_tokens: int


@dataclass(frozen=True)
class Stack:
    """The compose file's containers, up and healthy."""

    compose: DockerCompose

    def send(self, prompt: str, service: str = "envoy") -> Answer:
        """Sends a chat through an Envoy."""
        status, headers, body = self._post(service, ENVOY_PORT, CHAT, chat(prompt))
        if status != HTTPStatus.OK:
            return Answer(status, "", 0)
        usage = json.loads(body)["usage"]["prompt_tokens_details"]
        return Answer(status, headers["x-worker"], usage["cached_tokens"])

    def holders(self, prompt: str) -> int:
        """How many workers hold some of a prompt, as far as the router knows."""
        envelope = {"path": CHAT, "headers": {}, "body": chat(prompt)}
        _, _, body = self._post("kvsteer", ADMIN_PORT, "/explain", envelope)
        return sum(one["overlap_tokens"] > 0 for one in json.loads(body)["candidates"])

    def run(self, *command: str) -> str:
        """Runs a command of compose; returns what it prints."""
        whole = [*self.compose.docker_compose_command(), *command]
        done = subprocess.run(
            whole, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120
        )
        return done.stdout

    def hears_another(self) -> bool:
        """Whether one of the routers that share hears the other."""
        return "shared with" in self.run("exec", "-T", "router", "kvsteer", "top", "--once")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits; what: the condition in words."""
        try:
            blocked_until(condition, what, seconds=WAIT_SECONDS, pause=0.1)
        except AssertionError as error:
            error.add_note(self.compose.get_logs()[0])
            raise

    def _post(
        self, service: str, port: int, path: str, body: object
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        # Looked up each time: Docker gives a restarted container other ports.
        host, published = self.compose.get_service_host_and_port(service, port)
        connection = http.client.HTTPConnection(str(host), published, timeout=30)
        try:
            headers = {"content-type": "application/json"}
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()


def chat(prompt: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": "tiny", "max_tokens": 4, "messages": messages}


_numbers = count(1)


def new_prompt() -> str:
    sentence = "The same beginning need not be computed again by the worker that holds it. "
    return f"{next(_numbers)} is the number of this conversation. " + 4 * sentence


def docker(*command: str) -> str:
    whole = [shutil.which("docker") or "docker", *command]
    done = subprocess.run(whole, check=True, capture_output=True, text=True, timeout=240)
    return done.stdout.strip()


def fetch(image: str) -> None:
    """Pulls an image unless it is here; skips the test if that fails."""
    if not docker("image", "ls", "--quiet", image):
        try:
            docker("pull", "--quiet", image)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"{image} is not here and cannot be pulled: {error.stderr.strip()}")


def why_no_engine() -> str:
    docker = shutil.which("docker")
    if docker is None:
        return "there is no docker command"
    for command in ("info", "compose version"):
        whole = [docker, *command.split()]
        done = subprocess.run(whole, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode != 0:
            return f"`docker {command}` fails: {done.stderr.strip()}"
    return ""


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    reason = why_no_engine()
    if reason:
        pytest.skip(f"needs a Docker engine with compose: {reason}")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TESTCONTAINERS_RYUK_DISABLED", "true")
        # Separate from a stack that the user may be running.
        environment.setenv("COMPOSE_PROJECT_NAME", "kvsteer-test")
        environment.setenv("KVSTEER_IMAGE", "kvsteer:test")
        for port in ("", "_ADMIN", "_METRICS", "_ENVOY_ADMIN", "_SCALE"):
            environment.setenv(f"KVSTEER{port}_PORT", "0")
        with DockerCompose(ROOT, build=True) as compose:
            yield Stack(compose)


@pytest.fixture
def stopped_router(stack: Stack) -> Iterator[None]:
    stack.run("kill", "kvsteer")
    yield
    stack.run(*START_ROUTER)


@pytest.fixture
def scale(stack: Stack) -> Iterator[Stack]:
    """The stack with the services of the profile `scale` as well."""
    found = services()
    fetch(image_of(found["valkey"]))
    names = [name for name, service in found.items() if service.get("profiles") == ["scale"]]
    try:
        stack.run("up", "--wait", "--no-recreate", *names)
        yield stack
    finally:
        stack.run("rm", "--stop", "--force", *names)


def is_steered(stack: Stack, prompt: str) -> bool:
    """Whether a prompt's repetitions all find the cache that its first request filled."""
    holder = stack.send(prompt).worker
    stack.until(lambda: stack.holders(prompt) > 0, "the router learns who holds the prompt")
    answers = [stack.send(prompt) for _ in range(REPEATS)]
    return all(answer.worker == holder and answer.cached_tokens > 0 for answer in answers)


def test_repeated_prompt_goes_to_the_worker_that_holds_it(stack: Stack) -> None:
    assert is_steered(stack, new_prompt())


@pytest.mark.usefixtures("stopped_router")
def test_requests_are_answered_while_the_router_is_killed(stack: Stack) -> None:
    answers = [stack.send(new_prompt()) for _ in range(REPEATS)]
    assert {answer.status for answer in answers} == {HTTPStatus.OK}


def test_restarted_router_steers_again(stack: Stack) -> None:
    stack.run("kill", "kvsteer")
    stack.run(*START_ROUTER)
    stack.until(lambda: is_steered(stack, new_prompt()), "prompts are steered again")


def test_stopped_router_exits_with_0(stack: Stack) -> None:
    stack.run("stop", "kvsteer")
    container = stack.run("ps", "--all", "--quiet", "kvsteer").strip()
    assert docker("inspect", "--format={{.State.ExitCode}}", container) == "0"
    stack.run(*START_ROUTER)


def test_published_ports_are_on_loopback(stack: Stack) -> None:
    published = [
        publisher
        for container in stack.compose.get_containers()
        for publisher in container.Publishers
        if publisher.PublishedPort
    ]
    assert len(published) == 4
    assert {publisher.URL for publisher in published} == {"127.0.0.1"}


def test_sharing_routers_survive_the_loss_of_the_engine_or_of_one_router(scale: Stack) -> None:
    def statuses() -> set[int]:
        return {scale.send(new_prompt(), "envoy-scale").status for _ in range(REPEATS)}

    scale.until(scale.hears_another, "the routers hear each other")
    prompt = new_prompt()
    holder = scale.send(prompt, "envoy-scale").worker
    scale.until(lambda: scale.holders(prompt) > 0, "the routers learn who holds the prompt")
    answers = [scale.send(prompt, "envoy-scale") for _ in range(REPEATS)]
    assert {answer.worker for answer in answers} == {holder}
    scale.run("kill", "valkey")
    assert statuses() == {HTTPStatus.OK}
    scale.until(lambda: not scale.hears_another(), "each decides alone")
    scale.run("start", "valkey")
    scale.until(scale.hears_another, "the routers hear each other again")
    docker("kill", scale.run("ps", "--quiet", "router").split()[0])
    assert statuses() == {HTTPStatus.OK}
