"""A channel to an engine's gRPC server, and the method on it that events are subscribed to by."""

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from kvstate.feeds.feed_sources import GrpcSource
from kvstate.pb.kvsteer_kv_events_pb2 import SubscribeKvEventsRequest

# The gRPC service that each engine's server has the method on.
SERVICES = {
    "vllm": "vllm.grpc.engine.VllmEngine",
    "sglang": "sglang.grpc.scheduler.SglangScheduler",
    "trtllm": "trtllm.TrtllmService",
    "tokenspeed": "tokenspeed.grpc.scheduler.TokenSpeedScheduler",
}

# A server that died without a word is noticed by pings. The engines' servers allow one every 10 s
# on an idle stream and hang up on who does it more often; servers with the defaults of gRPC allow
# one every 5 minutes.
KEEPALIVE_INTERVAL_MS = 12_000
LONG_KEEPALIVE_INTERVAL_MS = 330_000
KEEPALIVE_TIMEOUT_MS = 3_000
MAX_MESSAGE_BYTES = 4 * 1024 * 1024

_OPTIONS = (
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),  # an idle engine sends none
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # how long an attempt may take
    ("grpc.max_reconnect_backoff_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # workers are near; a proxy of the environment is for others
)

# The call of a subscription; its messages stay serialized. grpc.aio is not typed.
Subscribe = Callable[[SubscribeKvEventsRequest], Any]


@contextlib.asynccontextmanager
async def subscribing(source: GrpcSource, keepalive_ms: int) -> AsyncIterator[Subscribe]:
    """Subscribes to a source, over one channel that is pinged so often."""
    options = (
        *_OPTIONS,
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # what gRPC 1.85 goes by
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    )
    async with grpc.aio.insecure_channel(source.target, options=options) as channel:
        yield channel.unary_stream(
            f"/{SERVICES[source.service]}/SubscribeKvEvents",
            request_serializer=SubscribeKvEventsRequest.SerializeToString,
        )
