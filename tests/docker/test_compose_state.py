"""The container's volume holds the state file: a router that restarts uses it, or refuses it."""

import pytest

from tests.docker.test_compose import START_ROUTER, Stack, new_prompt, stack

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]

__all__ = ["stack"]

FILE = "/var/lib/kvsteer/state"
KNOWN = "3 workers are known again, 0 are not, 0 have not answered yet"

# What becomes of the bytes of the file, by what it is called.
DAMAGES = {
    "cut off in the middle": "data[: len(data) // 2]",
    "without its last byte": "data[:-1]",
    "empty": "b''",
    "of zeros": "bytes(len(data))",
    "of another format": "data[:8] + b'\\x09' + data[9:]",
    "changed in its header": "data[:20] + bytes([data[20] ^ 1]) + data[21:]",
    "changed in its rows": "data[:-60] + bytes([data[-60] ^ 1]) + data[-59:]",
    "followed by something": "data + b'more'",
}

# Reads a thousand damaged copies of the file as a starting router does; prints how many were used.
THOUSAND = f"""
import pathlib, random, time
from extproc.running.state_file import read
from kvstate.index.index import saved_layout
data, chances = pathlib.Path({FILE!r}).read_bytes(), random.Random(37)
copy, used = pathlib.Path({FILE!r} + '.copy'), 0
for number in range(1000):
    at, length = number * len(data) // 1000, chances.randrange(1, 40)
    damaged = data[:at] + chances.randbytes(length) + data[at + chances.randrange(1, 40):]
    copy.write_bytes(damaged)
    copy.chmod(0o600)
    used += read(str(copy), saved_layout(), time.time()) is not None
copy.unlink()
print('used', used)
"""


def held(stack: Stack, prompts: list[str]) -> list[int]:
    """How many workers hold each prompt, as far as the router knows."""
    return [stack.holders(prompt) for prompt in prompts]


def said(stack: Stack, lines: int = 40) -> str:
    """The last lines of the router's log."""
    return stack.run("logs", "--no-log-prefix", "--tail", str(lines), "kvsteer")


def run_beside(stack: Stack, code: str) -> str:
    """Runs Python in a container with the router's volumes, while the router is stopped."""
    begin = ("run", "--rm", "--no-deps", "-T", "--entrypoint", "python", "kvsteer", "-c")
    return stack.run(*begin, code)


@pytest.fixture
def prompts(stack: Stack) -> list[str]:
    """Prompts that workers hold."""
    sent = [new_prompt() for _ in range(6)]
    for prompt in sent:
        stack.send(prompt)
    stack.until(lambda: all(held(stack, sent)), "the router learns who holds the prompts")
    return sent


def test_container_that_is_stopped_knows_again_what_workers_hold(
    stack: Stack, prompts: list[str]
) -> None:
    before = held(stack, prompts)
    stack.run("stop", "kvsteer")
    stack.run(*START_ROUTER)
    assert KNOWN in said(stack)
    assert held(stack, prompts) == before


@pytest.mark.parametrize("damage", DAMAGES)
def test_container_with_a_damaged_file_starts_clean(
    stack: Stack, prompts: list[str], damage: str
) -> None:
    stack.run("stop", "kvsteer")
    change = f"import pathlib; at = pathlib.Path({FILE!r}); data = at.read_bytes()"
    run_beside(stack, f"{change}; at.write_bytes({DAMAGES[damage]})")
    stack.run(*START_ROUTER)
    assert f"state.file: {FILE} is not used: " in said(stack)
    stack.until(lambda: all(held(stack, prompts)), "all is replayed")


def test_container_uses_none_of_a_thousand_damaged_files(stack: Stack, prompts: list[str]) -> None:
    assert all(held(stack, prompts))
    stack.run("stop", "kvsteer")
    assert run_beside(stack, THOUSAND).strip().endswith("used 0")
    stack.run(*START_ROUTER)
    assert KNOWN in said(stack)
