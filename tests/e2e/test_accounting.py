"""Predicted against reported cached tokens, read off responses behind a real Envoy."""

from typing import Any

import pytest

from tests.e2e.system import chat, long_text, running, until

USAGE = {"accounting": {"responses": "usage"}}
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


@pytest.mark.parametrize("extra", [{}, STREAMED], ids=["json", "events"])
async def test_what_engines_report_is_what_was_predicted(extra: dict[str, Any]) -> None:
    async with running(changes=USAGE) as system:
        exact = 'kvsteer_prediction_error_tokens_count{model="tiny",sign="exact"}'
        body = chat(long_text("alpha"), **extra)
        _, holder, _ = await system.send(body)
        await system.learned(chat(long_text("alpha")), holder)
        _, worker, _ = await system.send(body)
        assert worker == holder

        async def both() -> bool:
            return await system.metric(exact) == 2

        await until(both, "both predictions came true")
        reported = await system.metric('kvsteer_reported_cached_tokens_total{model="tiny"}')
        predicted = await system.metric('kvsteer_predicted_cached_tokens_total{model="tiny"}')
        assert reported == predicted > 0
        name = f'kvsteer_responses_total{{status="2xx",worker="{holder}"}}'
        assert await system.metric(name) == 2


async def test_requests_that_envoy_sent_elsewhere_are_seen_there() -> None:
    async with running(workers=2, changes={"accounting": {"responses": "headers"}}) as system:
        body = chat(long_text("alpha"))
        _, holder, _ = await system.send(body)
        await system.learned(body, holder)
        await system.stop_worker(holder)
        status, worker, _ = await system.send(body)
        assert (status, worker != holder) == (200, True)

        async def moved() -> bool:
            return await system.metric('kvsteer_answered_elsewhere_total{model="tiny"}') == 1

        await until(moved, "the request was seen on the other worker")
        assert await system.metric(f'kvsteer_responses_total{{status="2xx",worker="{worker}"}}')
        await until(lambda: system.in_flight(0), "nothing is in flight")
