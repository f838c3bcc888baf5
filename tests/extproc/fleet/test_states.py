from unittest.mock import ANY

from extproc.proof.state import NOT_SEEN
from extproc.routing.health.evidence import Judge
from tests.extproc.fleet.fleets import EVENTS, following, members, until_live, workers
from tests.memory_transport import MemoryTransport


async def test_status_has_every_field_of_the_contract() -> None:
    one = workers(f'{{endpoint: "127.0.0.1:1", model: a, block_size: 32, events: {EVENTS}}}')
    await one.start()
    status = await until_live(one)
    assert status["feeds"][0].items() >= {
        "rank": 0, "state": "live", "reason": "", "last_sequence": None, "blocks": 0,
        "orphans": 0, "gaps": 0, "replays": 1, "lag_seconds": 0.0,
    }.items()  # fmt: skip
    del status["feeds"]
    assert status == {
        "endpoint": "127.0.0.1:1",
        "name": "127.0.0.1:1",
        "other_endpoints": (),
        "model": "a",
        "state": "live",
        "reason": "",
        "block_size": 32,
        "blocks_by_tier": {"device": 0, "host": 0, "disk": 0, "remote": 0},
        "in_flight": 0,
        "contexts": {"conversations": 0, "live_tokens": 0, "cache_tokens": None},
        "engine": None,
        "engine_reason": ANY,
        "engine_arguments": None,
        "tokens": {
            "state": "off",
            "why": NOT_SEEN,
            "seconds": None,
            "compared": 0,
            "matched": 0,
            "mismatched": 0,
            "without_evidence": 0,
            "doubted": False,
            "forms": ANY,
            "request": None,
            "position": None,
            "ours": None,
            "engine": None,
            "cause": None,
        },
        "lora": None,
        "role": "both",
        "failed_halves": 0,
        "transfers": None,
        "store": None,
        "store_share": None,
        "saved_tokens": 0,
        "draining": False,
        "down": "",
        "astray": "",
        "excluded": "",
        "source": "workers",
        "source_fault": "",
        "speed": {
            "tokens_per_second": 8000,
            "confidence": 0.0,
            "used_tokens_per_second": 8000,
        },
        "pins": [],
        "reuse": {
            "other_groups": [],
            "unit_tokens": 1,
            "draft_drop": 0,
            "uncertain_because": "",
        },
        "predictions": {
            "requests": 0,
            "predicted_tokens": 0,
            "reported_tokens": 0,
            "unusable_tokens": 0,
            "causes": {},
            "uncertain_because": {},
        },
    }
    await one.close()


async def test_worker_without_events_is_unsupported_and_eligible() -> None:
    one = workers('{endpoint: "127.0.0.1:1", model: a}')
    await one.start()
    (candidate,) = one.candidates.list_for("a")
    assert (one.candidates.state(candidate.name), candidate.excluded) == ("unsupported", "")
    one.loads.begin("127.0.0.1:1", 0, 0.0)
    status = next(one.states.statuses())
    assert (status["in_flight"], status["reason"]) == (1, "no events are configured for it")
    await one.close()


async def test_statuses_skip_workers_removed_meanwhile() -> None:
    one = workers(", ".join(f'{{endpoint: "127.0.0.1:{port}", model: a}}' for port in (1, 2, 3)))
    await one.start()
    looks = one.states.statuses()
    assert next(looks)["name"] == "127.0.0.1:1"
    await one.replace(members(*(following(f"127.0.0.1:{port}") for port in (1, 3, 4))))
    one.loads.begin("127.0.0.1:3", 0, 0.0)
    assert [(two["name"], two["in_flight"]) for two in looks] == [("127.0.0.1:3", 1)]
    await one.close()


async def test_status_of_an_ejected_worker_names_its_cause() -> None:
    one = workers('{endpoint: "127.0.0.1:1", model: a}')
    await one.start()
    upstream = one.upstreams.get("127.0.0.1:1")
    assert upstream is not None
    one.upstreams.eject(upstream, Judge.PROBE, "is gone", 0.0)
    assert next(one.states.statuses())["down"] == "is gone"
    await one.close()


async def test_readiness_waits_for_replays() -> None:
    made: list[MemoryTransport] = []
    one = workers(f'{{endpoint: "127.0.0.1:1", model: a, events: {EVENTS}}}', made)
    await one.start()
    assert not one.states.replays_done()
    await until_live(one)
    assert one.states.replays_done()
    await one.close()
