"""A client of gRPC that the router refuses reads why, through a real Envoy."""

import grpc
import pytest

from tests.system.system import running

GENERATE = "/vllm.grpc.engine.VllmEngine/Generate"


async def test_grpc_client_reads_why_its_message_is_refused() -> None:
    async with running(1, changes={"disaggregation": {"mode": "header"}}) as system:
        target, zipped = system.envoy.removeprefix("http://"), grpc.Compression.Gzip
        async with grpc.aio.insecure_channel(target, compression=zipped) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await channel.unary_unary(GENERATE)(b"a" * 2_000, timeout=60)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "one uncompressed message" in (refused.value.details() or "")
