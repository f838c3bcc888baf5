"""The report of a running system: both sides, over a restart, and of two processes."""

import itertools
import signal
from pathlib import Path
from typing import Any

from extproc.base import address
from tests.ports import free_ports_apart
from tests.system.system import System, chat, long_text, running
from tests.waiting import until

USAGE = {"accounting": {"responses": "usage"}}


async def reported(system: System, admin: str = "") -> dict[str, Any]:
    """The report on the last hour, from GET /report."""
    url = f"{admin or system.admin}/report?format=json&since=1h"
    found: dict[str, Any] = {}

    async def is_complete() -> bool:  # it leaves out a process that is held up for two seconds
        async with system.session.get(url) as response:
            assert response.status == 200, await response.text()
            found.update(await response.json())
        return bool(found["notes"] == [])

    await until(is_complete, "a report of all processes")
    window: dict[str, Any] = found["windows"][0]
    return window


async def over(system: System, count: int) -> dict[str, Any]:
    """Waits until this many steered requests are over; returns the steered side."""

    async def all_over() -> bool:
        return bool((await reported(system))["steered"]["requests"] == count)

    await until(all_over, f"{count} requests are in the report")
    side: dict[str, Any] = (await reported(system))["steered"]
    return side


async def test_report_shows_what_engines_reported_and_survives_a_restart(
    tmp_path: Path,
) -> None:
    changes = USAGE | {"report": {"file": str(tmp_path / "report")}}
    async with running(workers=2, changes=changes) as system:
        body = chat(long_text("alpha"))
        _, holder, answer = await system.send(body)
        await system.learned(body, holder)
        usages = [answer["usage"], (await system.send(body))[2]["usage"]]
        side = await over(system, 2)
        cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usages)
        assert side["cached_tokens"] == cached > 0
        assert side["prompt_tokens"] == sum(one["prompt_tokens"] for one in usages)
        assert (side["cached_tokens_reported"], side["cached_tokens_predicted"]) == (2, 0)
        assert side["saved_prefill_seconds"] > 0
        assert sum(count for _, count in side["first_byte_buckets"]) == 2
        await system.stop_router(signal.SIGTERM)
        await system.start_router()
        assert await over(system, 2) == side
        await system.send(body)
        assert (await over(system, 3))["cached_tokens"] > side["cached_tokens"]


async def test_report_of_each_process_covers_the_requests_of_both() -> None:
    ports = [f"127.0.0.1:{free_ports_apart(2)}" for _ in range(3)]
    names = ("extproc", "admin", "metrics")
    changes: dict[str, Any] = {
        name: {"listen": listen} for name, listen in zip(names, ports, strict=True)
    }
    changes["extproc"]["processes"] = 2
    async with running(workers=2, changes=changes | USAGE) as system:

        async def all_ready() -> bool:  # the first process answers for both
            async with system.session.get(f"{system.metrics}/readyz") as response:
                return response.status == 200

        await until(all_ready, "both are ready")
        second = f"http://{address.nth(ports[1], 1)}"

        async def own() -> list[int]:
            found = []
            for admin in (system.admin, second):
                async with system.session.get(f"{admin}/report?format=counts") as response:
                    _, periods = await response.json()
                found.append(sum(period[3][0] for period in periods if period[0] == 0))
            return found

        numbers = itertools.count()

        async def both_have_some() -> bool:  # Envoy takes turns once it has found both
            assert (await system.send(chat(long_text(f"of both {next(numbers)}"))))[0] == 200
            return min(await own()) > 0

        await until(both_have_some, "both processes have requests")
        count = next(numbers)
        side = await over(system, count)
        assert (await reported(system, second))["steered"] == side
        assert sum(await own()) == count


async def test_report_compares_both_sides_of_a_split() -> None:
    changes = USAGE | {"steering": {"percent": 50}}
    async with running(workers=2, changes=changes) as system:
        bodies = [chat(long_text(f"conversation {number}")) for number in range(16)]
        for body in bodies * 2:
            assert (await system.send(body))[0] == 200

        async def all_over() -> bool:
            window = await reported(system)
            return bool(window["steered"]["requests"] + window["others"]["requests"] == 32)

        await until(all_over, "all requests are in the report")
        window = await reported(system)
        for side in (window["steered"], window["others"]):
            assert side["requests"] % 2 == 0 < side["requests"]  # a conversation stays on its side
            assert side["cached_tokens_reported"] == side["requests"]
            assert side["first_byte_seconds"]["p50"]["value"] > 0
        assert "no interval yet" in window["headline"]
