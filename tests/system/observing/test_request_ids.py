"""Which request was it? Its x-request-id joins a decision with Envoy's access log."""

import asyncio
import json
from contextlib import redirect_stdout
from io import StringIO

from extproc.__main__ import main
from tests.system.system import System, chat, long_text, running
from tests.waiting import until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
JSON_LOG = {"log": {"level": "debug", "format": "json", "decisions_percent": 100}}


def lines_about(system: System, request_id: str) -> list[dict[str, object]]:
    lines = [line for line in system.log.read_text().splitlines() if line.startswith("{")]
    return [one for one in map(json.loads, lines) if one.get("request_id") == request_id]


async def test_decision_is_found_by_the_id_of_its_request() -> None:
    async with running(workers=1, changes=JSON_LOG) as system:
        for name in ("first", "second"):
            headers = {"x-request-id": f"id-of-{name}"}
            status, worker, _ = await system.send(chat(long_text(name)), headers=headers)
            assert status == 200
        async with system.session.get(f"{system.admin}/decisions?request_id=id-of-first") as told:
            (decision,) = (await told.json())["decisions"]
        assert (decision["request_id"], decision["worker"]) == ("id-of-first", worker)

        async def is_logged() -> bool:
            return len(lines_about(system, "id-of-first")) == 2

        await until(is_logged, "both lines about the request")
        (with_fields,) = [one for one in lines_about(system, "id-of-first") if "decision" in one]
        assert isinstance(with_fields["decision"], dict)
        assert with_fields["decision"]["pick"] == [worker]
        assert with_fields["message"] == "decision"


async def test_explain_shows_the_decision_on_a_request_or_a_trace() -> None:
    async with running(workers=1) as system:
        headers = {"x-request-id": "x7", "traceparent": f"00-{TRACE}-{'1' * 16}-01"}
        _, worker, _ = await system.send(chat("a"), headers=headers)
        explain = ["explain", "--admin", system.admin]
        for option in (["--request-id", "x7"], ["--trace-id", TRACE]):
            shown = StringIO()
            with redirect_stdout(shown):
                assert await asyncio.to_thread(main, [*explain, *option]) == 0
            assert shown.getvalue().startswith(f"It went to {worker}")
            assert f"request x7, trace {TRACE}" in shown.getvalue()
        assert await asyncio.to_thread(main, [*explain, "--request-id", "another"]) == 1
