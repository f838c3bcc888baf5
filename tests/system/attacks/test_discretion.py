"""Nothing that a client sends appears in what the router tells: a canary is sent in every place."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from extproc.pb.kvsteer_ext_proc_pb2 import ProcessingRequest, ProcessingResponse
from tests.extproc.messages import body, head
from tests.extproc.serving.running import Running
from tests.ports import free_port
from tests.system.attacks.bodies import CHAT, COMPLETIONS
from tests.system.attacks.peer import PROCESS
from tests.system.attacks.victim import Victim, running_victim
from tests.waiting import until

CANARY = "c4narybird"
SECTIONS = """
log: {{level: debug}}
accounting: {{responses: usage}}
disaggregation: {{mode: header}}
policy: {{session_header: x-session, header: x-policy}}
misses: {{enabled: true}}
recorder: {{file: '{folder}/record.jsonl'}}
"""
HEADERS = {
    "authorization": f"Bearer {CANARY}",
    "x-api-key": CANARY,
    "cookie": f"a={CANARY}",
    "x-session": CANARY,
    "x-policy": CANARY,
    "traceparent": CANARY,
    "content-length": f"1{CANARY}",
}
ADMIN = (
    "/",
    "/workers",
    "/models",
    "/decisions",
    "/decisions/1",
    "/events",
    "/prefixes",
    "/history",
    "/discovery",
    "/draining",
    "/steering",
    "/routers",
    "/report",
    "/misses",
    "/metrics",
    "/no/such/page",
)


def chats() -> Iterator[bytes]:
    """Bodies that are fine, refused, and broken in many ways, each with the canary."""
    turn = {"role": "user", "content": CANARY}
    fine = {"model": "m", "messages": [turn], "prompt": [1, 2, 3]}
    for more in (
        {},
        {"model": CANARY},
        {"cache_salt": CANARY},
        {"user": CANARY, "kv_transfer_params": {"remote_host": CANARY}},
        {"messages": [turn | {"role": CANARY}]},
        {"messages": CANARY},
        {"tools": [{"type": CANARY}]},
        {"chat_template": CANARY},
        {"chat_template_kwargs": {CANARY: CANARY}},
        {"messages": [{"role": "user", "content": [{"type": CANARY, CANARY: 1}]}]},
    ):
        yield json.dumps(fine | more).encode()
    whole = json.dumps(fine).encode()
    yield from (whole[:-1], whole.replace(b"}", b"]"), whole.decode().encode("utf-16"))
    yield whole.replace(b"c4nary", b"\\ud800c4narybird")
    yield b'{"kv_transfer_params": "%b", ' % CANARY.encode() + whole
    yield CANARY.encode()


@pytest.fixture
def reporter(tmp_path: Path) -> Iterator[Victim]:
    """A router that tells as much as it can, except prompts."""
    sections = SECTIONS.format(folder=tmp_path)
    with running_victim(tmp_path, sections=sections) as victim:
        yield victim
        victim.leave()


async def sent(victim: Victim) -> None:
    """Sends the canary in every place, with each path."""
    async with victim.channel() as channel:
        for path in (CHAT, COMPLETIONS, f"/v1/{CANARY}", f"{CHAT}?key={CANARY}"):
            for content in chats():
                call = channel.stream_stream(
                    PROCESS,
                    request_serializer=ProcessingRequest.SerializeToString,
                    response_deserializer=ProcessingResponse.FromString,
                )()
                await call.write(head(path, headers=HEADERS))
                await call.read()
                await call.write(body(content))
                await call.read()
                await call.done_writing()
                await call.code()


async def told(victim: Victim) -> dict[str, str]:
    """Everything that it tells, by where."""
    found = {"log": victim.log_text()}
    async with aiohttp.ClientSession() as session:
        for port in victim.http_ports:
            for path in ADMIN:
                async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                    found[f"{port}{path}"] = await answer.text()
        url = f"http://127.0.0.1:{victim.http_ports[0]}/explain"
        for content in (*chats(), b'{"path": "%b", "body": []}' % CANARY.encode()):
            async with session.post(url, data=content) as answer:
                found[f"explain {content!r}"] = await answer.text()
    return found


async def test_router_output_contains_nothing_that_a_client_sent(
    reporter: Victim, tmp_path: Path
) -> None:
    await sent(reporter)
    recording = tmp_path / "record.jsonl"

    async def is_recorded() -> bool:
        return recording.exists() and recording.stat().st_size > 0

    await until(is_recorded, "something is recorded")
    places = await told(reporter) | {"recording": recording.read_text()}
    assert "decision: model m" in places["log"]
    assert [place for place, text in places.items() if CANARY in text] == []


async def test_internal_error_is_logged_without_its_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Running(f"127.0.0.1:{free_port()}")
    caplog.set_level(logging.DEBUG)

    one.router.fails, one.router.fault = "route", ValueError(CANARY)
    await one.server.start()
    call = one.process()
    await call.write(head(COMPLETIONS))
    await call.read()
    await call.write(body(b"{}"))
    assert (await call.code()).name == "INTERNAL"
    await one.channel.close()
    await one.server.stop()
    assert "ValueError" in caplog.text
    assert CANARY not in caplog.text
