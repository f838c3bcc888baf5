"""The bridge as a gateway of SMG sees it: with the client and the messages of smg-grpc-proto."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from tests.kvstate.bridging import FIRST, Engine, engine
from tests.kvstate.publishing import PATIENCE_SECONDS

WHY = "smg-grpc-proto is not installed: SMG's own messages are not compared"
common_pb2 = pytest.importorskip("smg_grpc_proto.generated.common_pb2", reason=WHY)
vllm = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2_grpc", reason=WHY)
sglang = pytest.importorskip("smg_grpc_proto.generated.sglang_scheduler_pb2_grpc", reason=WHY)
trtllm = pytest.importorskip("smg_grpc_proto.generated.trtllm_service_pb2_grpc", reason=WHY)
tokenspeed = pytest.importorskip(
    "smg_grpc_proto.generated.tokenspeed_scheduler_pb2_grpc", reason=WHY
)

STUBS = {
    "vllm": vllm.VllmEngineStub,
    "sglang": sglang.SglangSchedulerStub,
    "trtllm": trtllm.TrtllmServiceStub,
    "tokenspeed": tokenspeed.TokenSpeedSchedulerStub,
}


@pytest.fixture
async def running() -> AsyncIterator[Engine]:
    async with engine() as made:
        yield made


async def received(
    running: Engine, start: int = 0, batches: int = 1, service: str = "vllm"
) -> list[Any]:
    """The first batches of a stream."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{running.server.port}") as channel:
        request = common_pb2.SubscribeKvEventsRequest(start_sequence_number=start)
        stream = STUBS[service](channel).SubscribeKvEvents(request)
        async with asyncio.timeout(PATIENCE_SECONDS):
            return [await stream.read() for _ in range(batches)]


@pytest.mark.parametrize("service", STUBS)
async def test_smg_client_of_every_service_can_subscribe(running: Engine, service: str) -> None:
    (batch,) = await received(running, service=service)
    assert isinstance(batch, common_pb2.KvEventBatch)
    assert batch.snapshot.count == 1


async def test_smg_client_reads_every_field_of_a_store(running: Engine) -> None:
    running.publish(
        {
            "type": "BlockStored",
            "block_hashes": [2**64 - 1, b"\x00" * 31 + b"\x05"],
            "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "lora_id": 7,
            "medium": "CPU",
            "lora_name": "adapter",
            "extra_keys": [["adapter", ["image", 0], "tenant"], ["adapter"]],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
    )
    await running.follows()
    (batch,) = await received(running, start=FIRST)
    assert (batch.sequence_number, batch.dp_rank, batch.timestamp) == (FIRST, 0, 1000.0)
    stored = batch.events[0].stored
    assert [(block.block_hash, list(block.token_ids)) for block in stored.blocks] == [
        (-1, [1, 2]),
        (5, [3, 4]),
    ]
    assert {(block.block_size, block.cache_level) for block in stored.blocks} == {(2, 1)}
    assert (stored.tier, stored.medium) == (common_pb2.KV_CACHE_TIER_HOST, "CPU")
    assert stored.locality == common_pb2.KV_CACHE_LOCALITY_LOCAL
    assert (stored.lora_name, stored.cache_salt) == ("adapter", "tenant")
    assert (stored.group_idx, stored.kv_cache_spec_kind) == (0, "full_attention")
    image, salt = stored.blocks[0].extra_keys
    assert (image.multimodal.identifier, image.multimodal.offset) == ("image", 0)
    assert salt.text == "tenant"


async def test_bridge_sends_no_field_unknown_to_smg(running: Engine) -> None:
    running.publish(["BlockStored", [1], 9, [4], 1, 3, "DISK", None], ["BlockRemoved", [2], "GPU"])
    running.publish(["AllBlocksCleared"])
    await running.follows()
    for batch in await received(running) + await received(running, FIRST):
        known = common_pb2.KvEventBatch.FromString(batch.SerializeToString())
        known.DiscardUnknownFields()
        assert known.SerializeToString() == batch.SerializeToString()


async def test_adapter_without_a_name_and_removals_reach_smg(running: Engine) -> None:
    running.publish(["BlockStored", [1], 9, [4], 1, 3], ["BlockRemoved", [-2], "DISK"])
    await running.follows()
    (batch,) = await received(running, start=FIRST)
    stored, removed = batch.events
    assert (stored.stored.parent_block_hash, stored.stored.blocks[0].lora_id) == (9, 3)
    assert not stored.stored.HasField("lora_name")
    assert (list(removed.removed.block_hashes), removed.removed.cache_level) == ([-2], 2)
