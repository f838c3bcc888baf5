import argparse
import asyncio
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path
from typing import Any

import pytest

from kvtools.simulator.cli import add_arguments, greeting, run, settings_of
from kvtools.simulator.server import running
from kvtools.simulator.settings import Settings, split_address

MAIN = (
    "import argparse, sys; from kvtools.simulator.cli import add_arguments, run;"
    "parser = argparse.ArgumentParser(); add_arguments(parser);"
    "sys.exit(run(parser.parse_args()))"
)
FREE = ("--listen", "127.0.0.1:0", "--events", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0")


async def start(*options: str) -> Process:
    command = (sys.executable, "-c", MAIN, *options)
    return await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)


def parsed(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(options)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_worker_names_its_addresses_and_stops_on_a_signal(number: signal.Signals) -> None:
    process = await start(*FREE, "--name", "one")
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    tcp = r"tcp://127\.0\.0\.1:[1-9]\d*"
    http = r"http://127\.0\.0\.1:[1-9]\d*"
    assert re.fullmatch(rf"worker one listening on {http}, events {tcp}, replay {tcp}\n", line)
    process.send_signal(number)
    async with asyncio.timeout(60):
        _, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")


@pytest.mark.parametrize("dialect", ["vllm-0.32", "sglang-0.5.22"])
async def test_worker_stops_at_once_during_an_answer(dialect: str) -> None:
    process = await start(*FREE, "--dialect", dialect, "--decode-tokens-per-second", "5")
    assert process.stdout is not None
    address = (await process.stdout.readline()).decode().split("http://")[1].split(",")[0]
    host, port = split_address(address)
    reader, writer = await asyncio.open_connection(host, port)
    body = b'{"prompt": [%s1], "max_tokens": 999, "stream": true}' % (b"1, " * 16)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: w\r\n")
    writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await reader.readuntil(b"data: ")
    process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(60):
        _, errors = await process.communicate()
    writer.close()
    assert (process.returncode, errors) == (0, b"")


def test_taken_port_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert run(parsed(*FREE, "--listen", address)) == 1
        message = f"worker: cannot listen on {address}: Address already in use\n"
        assert capsys.readouterr().err == message
        assert run(parsed(*FREE, "--replay", f"tcp://{address}")) == 1
        message = f"worker: cannot bind tcp://{address}: Address already in use\n"
        assert capsys.readouterr().err == message


def test_directory_without_a_model_is_one_line_and_status_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(parsed(*FREE, "--model-dir", str(tmp_path))) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"blocks": 1}, "blocks must be at least 2"),
        ({"block_size_tokens": 0}, "block_size_tokens must be at least 1"),
        ({"decode_tokens_per_second": 0}, "decode_tokens_per_second must be above 0"),
        ({"prefill_tokens_per_second": float("nan")}, "prefill_tokens_per_second must be above 0"),
        ({"loras": ("a", "a")}, "model and LoRA names must differ from each other"),
        ({"events_endpoint": None}, "a replay endpoint needs an events endpoint"),
        ({"listen": "nowhere"}, "not a host:port: 'nowhere'"),
        ({"listen": "::1:80"}, "an IPv6 address needs brackets: '::1:80'"),
    ],
)
def test_settings_name_their_fault(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Settings(**wrong)


def test_options_reach_the_settings() -> None:
    numbers = ("--ranks", "2", "--host-blocks", "3", "--drain-events", "4")
    switches = ("--bigrams", "--connect", "--misbehave")
    endpoints = ("--events", "tcp://h:5000", "--replay", "tcp://h:6000")
    settings = settings_of(parsed("--dialect", "sglang-0.4", *numbers, *switches, *endpoints))
    assert settings.dialect == "sglang-0.4"
    assert (settings.ranks, settings.host_blocks, settings.drain_events) == (2, 3, 4)
    assert (settings.bigrams, settings.connect, settings.misbehave) == (True, True, True)
    assert not settings.placeholders
    assert settings_of(parsed("--placeholders", "--events", "none")).placeholders


async def test_worker_with_ranks_names_the_address_of_each() -> None:
    async with running(Settings(name="two", ranks=2)) as worker:
        line = greeting(worker)
    assert len(re.findall(r"tcp://127\.0\.0\.1:\d+", line)) == 4


def test_ipv6_address_is_split_without_its_brackets() -> None:
    assert split_address("[::1]:80") == ("::1", 80)


def test_cache_smaller_than_the_model_limits_the_context() -> None:
    assert Settings(blocks=11, block_size_tokens=16).context_tokens == 160
    assert Settings(max_model_len_tokens=100).context_tokens == 100
