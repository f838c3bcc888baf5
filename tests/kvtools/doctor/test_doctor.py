"""The doctor finds what is planted in simulated workers, and nothing in healthy ones."""

import asyncio
import contextlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from extproc.config.schema import (
    Config,
    DiscoverySettings,
    Events,
    Kubernetes,
    Model,
    Policy,
    RemoteTokenizerSettings,
    WorkerEngine,
    WorkerEvents,
    WorkerSettings,
)
from extproc.config.sections import Classes, ClassSettings, Isolation
from kvtools.doctor.doctor import visit_sources
from kvtools.doctor.findings import Severity, exit_status
from kvtools.simulator import worker as simulated
from kvtools.simulator.settings import TINY_MODEL
from tests.kvtools.doctor.fleet import (
    MODEL,
    SILENT_SECONDS,
    codes_of,
    events_of,
    findings_of,
    one_worker,
    two_free_ports,
    with_events,
)
from tests.ports import free_port

DIALECTS = ("vllm-0.9", "vllm-0.24", "vllm-0.32", "sglang-0.4", "sglang-0.5.22", "trtllm")


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.slow
async def test_doctor_finds_no_fault_in_a_healthy_worker(dialect: str) -> None:
    async with one_worker(dialect=dialect) as (_, worker):
        assert exit_status(await findings_of(worker)) == 0
        found = await findings_of(worker, probes=True)
    assert exit_status(found) == 0
    right = {one.check for one in found if one.verdict is Severity.RIGHT}
    shown = {"tokens"} if dialect != "trtllm" else set()  # trtllm has no /tokenize
    shown.add("engine")
    assert right >= {"http", "models", "feed", "probe", "replay", "clock", "block size", *shown}


async def test_doctor_finds_no_fault_in_a_healthy_fleet() -> None:
    two_ranks = {"ranks": 2, "events_endpoint": f"tcp://127.0.0.1:{two_free_ports()}"}
    no_events = {"events_endpoint": None, "replay_endpoint": None}
    async with (
        one_worker() as (_, first),
        one_worker(topic="kv", replay_endpoint=None, **two_ranks) as (_, second),
        one_worker(**no_events) as (_, third),
    ):
        fleet = (first, with_events(second, topic="kv"), third)
        assert not await codes_of(*fleet, probes=True)


@pytest.mark.slow
async def test_doctor_needs_no_ports_of_a_worker_that_announces_its_feed() -> None:
    async with one_worker(ranks=2) as (_, worker):
        assert not await codes_of(replace(worker, events="auto"), probes=True)


@pytest.mark.slow
async def test_doctor_sends_no_request_without_a_probe() -> None:
    async with one_worker() as (simulated, worker):
        await findings_of(worker)
        assert simulated.next_sequence() == 0


@pytest.mark.slow
async def test_doctor_skips_disabled_events() -> None:
    async with one_worker() as (_, worker):
        lost = with_events(worker, zmq=f"tcp://127.0.0.1:{free_port()}")
        assert not await codes_of(lost, events=Events(enabled=False))


@pytest.mark.slow
async def test_unreachable_worker_is_found() -> None:
    assert await codes_of(WorkerSettings(f"127.0.0.1:{free_port()}")) == {"worker-unreachable"}


@pytest.mark.slow
async def test_worker_of_another_model_is_found() -> None:
    async with one_worker(model="other") as (_, worker):
        assert await codes_of(worker, probes=True) == {"model-not-served"}


@pytest.mark.slow
async def test_missing_adapter_is_found() -> None:
    async with one_worker(loras=("a",)) as (_, worker):
        assert not await codes_of(replace(worker, lora=("a",)))
        assert await codes_of(replace(worker, lora=("a", "b"))) == {"adapter-not-served"}


@pytest.mark.parametrize("dialect", ["vllm-0.32", "sglang-0.5.22"])
@pytest.mark.slow
async def test_disabled_events_of_an_engine_are_found(dialect: str) -> None:
    settings = {"events_endpoint": None, "replay_endpoint": None, "dialect": dialect}
    async with one_worker(**settings) as (_, worker):
        events = WorkerEvents(zmq=f"tcp://127.0.0.1:{free_port()}")
        assert "events-off" in await codes_of(replace(worker, events=events))
        assert await codes_of(replace(worker, events="auto")) == {"events-off"}


@pytest.mark.slow
async def test_engine_that_cannot_announce_its_feed_is_found() -> None:
    async with one_worker(dialect="vllm-0.24") as (_, worker):
        assert await codes_of(replace(worker, events="auto")) == {"events-untold"}


@pytest.mark.slow
async def test_closed_port_is_found_with_the_right_one() -> None:
    async with one_worker() as (simulated, worker):
        wrong = with_events(worker, zmq=f"tcp://127.0.0.1:{free_port()}")
        (fault,) = [one for one in await findings_of(wrong) if one.code]
    assert fault.code == "feed-nobody-listens"
    assert str(simulated.events_endpoint) in fault.says


@pytest.mark.slow
async def test_port_of_another_server_is_found() -> None:
    async with one_worker() as (_, worker):
        wrong = with_events(
            worker, zmq=f"tcp://{worker.endpoint}", replay=f"tcp://{worker.endpoint}"
        )
        assert await codes_of(wrong) == {"feed-not-zmq", "replay-not-zmq"}


@pytest.mark.slow
async def test_swapped_ports_of_events_and_replay_are_found() -> None:
    async with one_worker() as (simulated, worker):
        swapped = with_events(
            worker, zmq=simulated.replay_endpoint, replay=simulated.events_endpoint
        )
        assert await codes_of(swapped) == {"feed-wrong-socket", "replay-wrong-socket"}


@pytest.mark.slow
async def test_load_port_is_visited() -> None:
    async with one_worker() as (simulated, worker):
        right = with_events(worker, load=simulated.events_endpoint)  # any publisher will do
        assert not await codes_of(right)
        wrong = with_events(worker, load=simulated.replay_endpoint)
        assert await codes_of(wrong) == {"load-wrong-socket"}


@pytest.mark.slow
async def test_topic_that_the_worker_contradicts_is_found() -> None:
    async with one_worker(topic="kv-events") as (_, worker):
        assert not await codes_of(with_events(worker, topic="kv"))
        assert await codes_of(with_events(worker, topic="other")) == {"topic-wrong"}


@pytest.mark.slow
async def test_topic_without_messages_is_found_by_a_probe() -> None:
    async with one_worker(topic="kv-events", dialect="vllm-0.24") as (_, worker):
        wrong = with_events(worker, topic="other")
        assert await codes_of(wrong, probes=True, seconds=SILENT_SECONDS) == {"topic-wrong"}


@pytest.mark.slow
async def test_wrong_number_of_ranks_is_found() -> None:
    async with one_worker(ranks=2) as (_, worker):
        assert await codes_of(with_events(worker, ranks=1)) == {"ranks-miscounted"}
    endpoint = f"tcp://127.0.0.1:{two_free_ports()}"
    settings = {"events_endpoint": endpoint, "replay_endpoint": None}
    async with one_worker(dialect="vllm-0.24", **settings) as (_, worker):
        assert await codes_of(with_events(worker, ranks=2)) == {"rank-missing"}


@pytest.mark.slow
async def test_different_block_size_is_found() -> None:
    async with one_worker(dialect="sglang-0.5.22", block_size_tokens=32) as (_, worker):
        assert await codes_of(replace(worker, block_size=16)) == {"block-size"}
    async with one_worker(block_size_tokens=32) as (_, worker):
        assert not await codes_of(worker, probes=True)
        assert await codes_of(replace(worker, block_size=16), probes=True) == {"block-size"}


async def test_different_release_is_found() -> None:
    async with one_worker(engine_version="0.30.0") as (_, worker):
        given = WorkerEngine("vllm", "0.32.0")
        assert await codes_of(replace(worker, engine=given)) == {"engine-differs"}


async def test_engine_without_a_release_is_noted() -> None:
    async with one_worker(engine_version="dev") as (_, worker):
        (found,) = [one for one in await findings_of(worker) if one.check == "engine"]
    assert found.verdict is Severity.NOTE
    assert "'dev' is no release" in found.says


@pytest.mark.slow
async def test_feed_of_another_worker_is_found() -> None:
    async with one_worker() as (simulated, _), one_worker(dialect="vllm-0.24") as (_, worker):
        wrong = replace(worker, events=events_of(simulated))
        assert await codes_of(wrong, probes=True, seconds=SILENT_SECONDS) == {"feed-silent"}


async def test_feeds_and_replays_swapped_between_workers_are_found() -> None:
    async with one_worker() as (_, one), one_worker() as (_, two):
        assert not await codes_of(one, two)
        swapped = replace(one, events=two.events), replace(two, events=one.events)
        found = [one for one in await findings_of(*swapped) if one.code]
        assert [each.code for each in found] == ["feed-swapped", "replay-swapped"] * 2
        assert f"is the feed of worker {two.endpoint}" in found[0].says
        assert isinstance(one.events, WorkerEvents)
        assert isinstance(two.events, WorkerEvents)
        ours = with_events(one, replay=two.events.replay)
        assert await codes_of(ours, two) == {"replay-swapped"}


async def test_replay_of_another_worker_is_found_by_a_probe() -> None:
    async with (
        one_worker(dialect="vllm-0.24") as (_, one),
        one_worker(dialect="vllm-0.24") as (_, two),
    ):
        assert not await codes_of(one, two, probes=True)
        assert isinstance(two.events, WorkerEvents)
        wrong = with_events(one, replay=two.events.replay)
        assert await codes_of(wrong, probes=True) == {"replay-swapped"}


async def test_unconfigured_adapter_is_found() -> None:
    async with one_worker(loras=("a", "b")) as (_, worker):
        assert await codes_of(worker) == {"adapter-not-configured"}
        models = (replace(MODEL, lora=("a", "b")),)
        assert not await codes_of(worker, models=models)


@pytest.mark.parametrize("dialect", ["vllm-0.32", "sglang-0.5.22"])
async def test_disabled_prefix_caching_is_found_without_a_probe(dialect: str) -> None:
    async with one_worker(dialect=dialect, prefix_caching=False) as (_, worker):
        assert await codes_of(worker) == {"prefix-caching-off"}


# How an engine's template may differ: each is put before the tiny model's.
OTHER_TEMPLATES = {
    "with a system turn": "{% if messages[0]['role'] == 'system' %}x{% endif %}",
    "of several turns": "{% if messages | length > 2 %}x{% endif %}",
    "with tools": "{% if tools %}x{% endif %}",
    "that thinks": "{% if enable_thinking is defined and enable_thinking %}x{% endif %}",
    "that does not think": "{% if enable_thinking | default(true) == false %}x{% endif %}",
}


@pytest.mark.parametrize("kind", OTHER_TEMPLATES)
async def test_template_that_differs_for_one_form_is_found(kind: str, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(TINY_MODEL, copy)
    template = copy / "chat_template.jinja"
    template.write_text(OTHER_TEMPLATES[kind] + template.read_text())
    async with one_worker(model_dir=copy) as (_, worker):
        (fault,) = [one for one in await findings_of(worker) if one.code]
    assert fault.code == "tokens-differ"
    assert f"a conversation {kind}, token" in fault.says


@pytest.mark.parametrize(
    ("fault", "probes", "code"),
    [
        ("absent", False, "replay-nobody-listens"),
        ("silent", False, "replay-silent"),
        ("truncated", True, "replay-truncated"),
    ],
)
@pytest.mark.slow
async def test_broken_replay_is_found(fault: Any, *, probes: bool, code: str) -> None:
    async with one_worker() as (simulated, worker):
        simulated.faults.hide_replay(fault)
        for _ in range(2):
            assert not await codes_of(with_events(worker, replay=None), probes=True) - {
                "replay-unused"
            }
        assert await codes_of(worker, probes=probes, seconds=SILENT_SECONDS) == {code}


@pytest.mark.slow
async def test_unused_replay_is_found() -> None:
    async with one_worker() as (_, worker):
        assert await codes_of(with_events(worker, replay=None)) == {"replay-unused"}


@pytest.mark.slow
async def test_messages_that_are_no_events_are_found() -> None:
    async with one_worker() as (simulated, worker):
        simulated.faults.corrupt("batch")
        found = await codes_of(worker, probes=True, seconds=SILENT_SECONDS)
    assert "feed-unreadable" in found


@pytest.mark.slow
async def test_clock_difference_is_found() -> None:
    async with one_worker() as (simulated, worker):
        simulated.faults.shift_clock(-3600.0)
        assert await codes_of(worker, probes=True) == {"clock-skew"}


def other_tokenizer(directory: Path) -> Path:
    """The tiny model with the ids of two words swapped."""
    copy = directory / "model"
    shutil.copytree(TINY_MODEL, copy)
    file = copy / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["The"], vocabulary["0"] = vocabulary["0"], vocabulary["The"]
    file.write_text(json.dumps(content))
    return copy


@pytest.mark.slow
async def test_different_tokenizer_is_found(tmp_path: Path) -> None:
    async with one_worker(model_dir=other_tokenizer(tmp_path)) as (_, worker):
        (fault,) = [one for one in await findings_of(worker) if one.code]
    assert fault.code == "tokens-differ"
    assert "token 0 is" in fault.says


@pytest.mark.slow
async def test_dozen_faults_of_a_fleet_are_found_in_one_run(tmp_path: Path) -> None:
    no_events: dict[str, Any] = {"events_endpoint": None, "replay_endpoint": None}
    async with contextlib.AsyncExitStack() as stack:

        async def start(**settings: Any) -> tuple[simulated.SimulatedWorker, WorkerSettings]:
            return await stack.enter_async_context(one_worker(**settings))

        _, sound = await start()
        _, off = await start(**no_events)
        _, large = await start(dialect="sglang-0.5.22", block_size_tokens=32)
        silent, unanswered = await start()
        silent.faults.hide_replay("silent")
        absent, closed = await start()
        absent.faults.hide_replay("absent")
        (_, port), (_, topic), (_, ranks) = await start(), await start(topic="kv"), await start()
        swapped, exchanged = await start()
        web = f"tcp://{sound.endpoint}"
        planted = {
            "": sound,
            "worker-unreachable": WorkerSettings(f"127.0.0.1:{free_port()}"),
            "model-not-served": (await start(model="other"))[1],
            "adapter-not-served": replace((await start())[1], lora=("a",)),
            "events-off": replace(off, events="auto"),
            "block-size": replace(large, block_size=16),
            "replay-silent": unanswered,
            "replay-nobody-listens": closed,
            "feed-not-zmq": with_events(port, zmq=web),
            "topic-wrong": with_events(topic, topic="other"),
            "ranks-miscounted": with_events(ranks, ranks=2, replay=None),
            "feed-wrong-socket": with_events(exchanged, zmq=swapped.replay_endpoint),
            "replay-unused": with_events((await start())[1], replay=None),
            "tokens-differ": (await start(model_dir=other_tokenizer(tmp_path)))[1],
            "grpc-unreachable": WorkerSettings(
                (await start())[0].endpoint,
                events=WorkerEvents(grpc=f"127.0.0.1:{free_port()}"),
            ),
        }
        found = await findings_of(*planted.values())
    for code, worker in planted.items():
        about_it = {one.code for one in found if one.subject == f"worker {worker.endpoint}"}
        assert (code or "") in about_it, code
        assert (about_it == {""}) is (not code), code


@pytest.mark.slow
async def test_unreadable_tokenizer_is_found(tmp_path: Path) -> None:
    async with one_worker() as (_, worker):
        models = (replace(MODEL, tokenizer=str(tmp_path)),)
        assert await codes_of(worker, models=models) == {"tokenizer-unloadable"}


@pytest.mark.slow
async def test_remote_tokenizer_is_asked() -> None:
    remote = Model("tiny", tokenizer=RemoteTokenizerSettings(deadline_ms=60_000))
    async with one_worker() as (_, worker):
        assert not await codes_of(worker, models=(remote,), probes=True)


@pytest.mark.slow
async def test_empty_source_is_found(tmp_path: Path) -> None:
    async with one_worker() as (_, worker):
        file = tmp_path / "workers.yaml"
        options: dict[str, Any] = {"discovery": DiscoverySettings(file=str(file))}
        assert await codes_of(worker, **options) == {"discovery-fault"}
        file.write_text("[]")
        assert await codes_of(worker, **options) == {"no-workers"}


async def test_source_with_a_missing_extra_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes_asyncio", None)
    pods = Kubernetes(selector="app=vllm")
    fleet, (found,) = await visit_sources(Config(discovery=DiscoverySettings(kubernetes=pods)), 0.5)
    shown = "discovery.kubernetes: needs the extra: pip install '.[kubernetes]' in a clone"
    assert (fleet, found.code, found.says) == ([], "extra-missing", shown)


async def test_empty_fleet_is_reported_once(tmp_path: Path) -> None:
    file = tmp_path / "workers.yaml"
    file.write_text("[]")
    found = await findings_of(discovery=DiscoverySettings(file=str(file)))
    assert [one.says for one in found if one.verdict is Severity.WRONG] == ["it lists no worker"]


@pytest.mark.slow
async def test_discovered_workers_are_visited(tmp_path: Path) -> None:
    file = tmp_path / "workers.yaml"
    file.write_text(f"- endpoint: 127.0.0.1:{free_port()}")
    assert await codes_of(discovery=DiscoverySettings(file=str(file))) == {"worker-unreachable"}


@pytest.mark.slow
async def test_missing_grpc_feed_is_found() -> None:
    async with one_worker() as (_, worker):
        events = WorkerEvents(grpc=f"127.0.0.1:{free_port()}")
        found = await codes_of(replace(worker, events=events))
    assert found == {"grpc-unreachable"}


@pytest.mark.slow
async def test_grpc_server_without_events_is_found() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with one_worker() as (_, worker):
        events = WorkerEvents(grpc=f"127.0.0.1:{port}")
        assert await codes_of(replace(worker, events=events)) == {"grpc-unimplemented"}
    await server.stop(None)


@pytest.mark.slow
async def test_queue_is_drained_only_for_a_probe() -> None:
    async with one_worker(dialect="trtllm") as (simulated, worker):
        queue = replace(worker, events=WorkerEvents(drain=f"http://{worker.endpoint}"))
        assert not await codes_of(queue)
        assert simulated.ranks[0].drain()
        assert not await codes_of(queue, probes=True)
        assert not simulated.ranks[0].drain()


@pytest.mark.slow
async def test_engine_without_a_queue_is_found() -> None:
    async with one_worker() as (_, worker):
        queue = replace(worker, events=WorkerEvents(drain=f"http://{worker.endpoint}"))
        assert await codes_of(queue, probes=True) == {"drain-refused"}


@pytest.mark.slow
async def test_second_reader_of_a_queue_is_found() -> None:
    async with one_worker(dialect="trtllm") as (simulated, worker):
        queue = replace(worker, events=WorkerEvents(drain=f"http://{worker.endpoint}"))

        async def steal() -> None:
            while True:
                simulated.ranks[0].drain()
                await asyncio.sleep(0)

        thief = asyncio.create_task(steal())
        found = await codes_of(queue, probes=True, seconds=SILENT_SECONDS)
        thief.cancel()
    assert found == {"drain-shared"}


async def test_worker_is_asked_about_its_queue_and_its_store_where_they_matter(
    tmp_path: Path,
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef")
    isolation = Isolation("x-tenant", str(secret))
    classes = Classes("x-class", "a", (ClassSettings("a"), ClassSettings("b", 10)))
    async with one_worker(dialect="sglang-0.5.22") as (_, entry):
        policy = Policy(classes=classes)
        found = await findings_of(entry, isolation=isolation, policy=policy)
    says = [one.says for one in found if one.check == "classes"]
    assert any("does not say whether it schedules by priority" in one for one in says)
    assert any("reads no priority on /v1/responses" in one for one in says)
    assert not [one for one in found if one.code == "isolation-store"]
